"""A running total of the loss keeps the graph of every sample; backward comes only at the end."""

import torch
from torch import nn

model = nn.LSTM(512, 1024, num_layers=2, batch_first=True).to("cuda")
head = nn.Linear(1024, 64).to("cuda")
total = 0
for _ in range(500):
    x = torch.randn(16, 128, 512, device="cuda")
    y, _ = model(x)
    loss = head(y).logsumexp(-1).mean()
    total += loss
total.backward()
