"""A CUDA device that is not there: unmodified scripts on fake tensors, sized by the allocator model."""
