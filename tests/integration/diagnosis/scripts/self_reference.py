"""Objects that refer to themselves hold a large tensor each until Python's collector comes by."""

import torch


class Holder:
    def __init__(self) -> None:
        self.data = torch.empty(100, 1024, 1024, device="cuda")
        self.me = self


for _ in range(100):
    Holder()
