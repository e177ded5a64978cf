#include "step.h"

#include "step_thread.h"

void* qt_workspace_new() { return new qt::Workspace; }

void qt_workspace_free(void* workspace) { delete static_cast<qt::Workspace*>(workspace); }

void qt_workspace_ticks(const void* workspace, int64_t* ticks) {
  std::memcpy(ticks, static_cast<const qt::Workspace*>(workspace)->ticks,
              sizeof qt::Workspace::ticks);
}

void qt_step(const qt::Model* model, const qt::StepBatch* batch, void* workspace) {
  auto& space = *static_cast<qt::Workspace*>(workspace);
  const qt::Step step = qt::prepare(*model, *batch, space, qt_pool_size());
  auto body = [&](int thread, int count) { qt::Thread(step, thread, count).run(); };
  qt::pool_run(body);
}
