"""Load a checkpoint and generate: kernels, decoder, paged cache, scheduler, engine, server."""
