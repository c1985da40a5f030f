"""Inside a pool of its own a request fails that the default pool would serve."""

import torch

pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    first = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    del first
    second = torch.empty(int(3.5 * (1 << 30)), dtype=torch.uint8, device="cuda")
