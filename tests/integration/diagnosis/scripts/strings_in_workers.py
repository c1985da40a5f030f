"""A data set that is a list of strings, read by forked workers: each read changes a reference count, and so a page."""

import time

import torch
from torch.utils.data import DataLoader, Dataset


class Names(Dataset):
    def __init__(self):
        self.names = [f"{n:0200d}" for n in range(600_000)]

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return len(self.names[index])


model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
loader = DataLoader(Names(), batch_size=2000, num_workers=3, multiprocessing_context="fork")
for batch in loader:
    loss = model(batch.float()[:, None]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.08)
