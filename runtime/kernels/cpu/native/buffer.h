// Memory that grows and is kept.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace qt {

class Buffer {
 public:
  // At least `count` items at a cache line; what was in them is lost if the buffer grows.
  template <class T>
  T* reserve(size_t count) {
    constexpr size_t ALIGNMENT = 64;
    const size_t bytes = (count * sizeof(T) / ALIGNMENT + 1) * ALIGNMENT;
    if (bytes > size_) {
      memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(ALIGNMENT, bytes)));
      size_ = bytes;
    }
    return get<T>();
  }
  template <class T>
  T* get() const {
    return reinterpret_cast<T*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t, Free> memory_;
  size_t size_ = 0;
};

}  // namespace qt
