"""The CUDA caching allocator: model, exact replay, what-if."""
