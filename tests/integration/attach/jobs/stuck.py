# ruff: noqa: T201  # a job, not a library
"""The main thread waits for a lock that it holds itself; another thread sleeps."""

import threading
import time

threading.Thread(target=lambda: [time.sleep(0.01) for _ in range(100_000)], daemon=True).start()
lock = threading.Lock()
lock.acquire()
print("ready", flush=True)
lock.acquire()
