"""A sharded optimizer that flattens parameters on the CPU and brings the copy back while the model is still there."""

from torch import nn
from torch._utils import _flatten_dense_tensors


class ShardedOptimizer:
    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.flat = self._flatten_and_shard()

    def _flatten_and_shard(self):
        on_host = [p.detach().cpu() for p in self.parameters]
        return _flatten_dense_tensors(on_host).cuda()


model = nn.Sequential(nn.Linear(10_000, 10_000, bias=False), nn.Linear(10_000, 10_000, bias=False)).cuda()
optimizer = ShardedOptimizer(model.parameters())
