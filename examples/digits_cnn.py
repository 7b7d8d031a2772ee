"""A small CNN on scikit-learn's digits: workers pull the weights and push gradients; the store updates them.

    python examples/digits_cnn.py                                                 # one process; needs scikit-learn
    shoal launch --servers 2 --workers 2 examples/digits_cnn.py                   # the same steps, on two workers
    python examples/digits_cnn.py --cluster tcp://scheduler:5570                  # as one worker of a cluster

Each worker takes its share of every mini-batch. The servers add up the workers' gradients and make one step of SGD when
all workers have ticked, so the losses are those of plain SGD on whole mini-batches, for any number of workers.
"""

import argparse
import os

import numpy as np
from sklearn.datasets import load_digits

import shoal

FILTERS, SIZE, LR, BATCH = 8, 3, 0.3, 64
SHAPES = {"kernel": (SIZE * SIZE, FILTERS), "shift": (FILTERS,), "dense": (9 * FILTERS, 10), "bias": (10,)}


def start(name: str, seed: int = 1) -> np.ndarray:
    """Draw the initial weights (He et al., ICCV'15), the same in every worker."""
    shape = SHAPES[name]
    scale = np.sqrt(2 / shape[0]) if len(shape) == 2 else 0.0
    return (scale * np.random.default_rng([seed, len(name)]).normal(size=shape)).astype(np.float32)


def backward(w: dict[str, np.ndarray], images: np.ndarray, digits: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    """Return the summed loss of some images, and its gradients: convolution, ReLU, 2 x 2 pooling, softmax."""
    n = len(images)
    patches = np.lib.stride_tricks.sliding_window_view(images, (SIZE, SIZE), axis=(1, 2)).reshape(n, 6, 6, SIZE * SIZE)
    filtered = patches @ w["kernel"] + w["shift"]
    pooled = np.maximum(filtered, 0).reshape(n, 3, 2, 3, 2, FILTERS).mean(axis=(2, 4)).reshape(n, -1)
    scores = pooled @ w["dense"] + w["bias"]
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    loss = -float(np.log(p[np.arange(n), digits]).sum())
    p[np.arange(n), digits] -= 1
    spread = np.repeat(np.repeat((p @ w["dense"].T).reshape(n, 3, 3, FILTERS) / 4, 2, axis=1), 2, axis=2)
    slopes = spread * (filtered > 0)
    kernel = np.tensordot(patches, slopes, axes=((0, 1, 2), (0, 1, 2)))
    return loss, {"kernel": kernel, "shift": slopes.sum(axis=(0, 1, 2)), "dense": pooled.T @ p, "bias": p.sum(axis=0)}


def train(store: shoal.Store, epochs: int) -> list[float]:
    """Learn; return the mean loss of this worker's examples in each epoch."""
    images, digits = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    tables = {name: store.dense(name, shape, optimizer=shoal.SGD(lr=LR)) for name, shape in SHAPES.items()}
    for name, table in tables.items():
        table.assign(start(name))
    store.barrier()
    losses = []
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(images))
        total, count = 0.0, 0
        for begin in range(0, len(order), BATCH):
            batch = order[begin : begin + BATCH]
            mine = batch[store.rank :: store.num_workers]
            weights = {name: table.pull() for name, table in tables.items()}
            loss, gradients = backward(weights, images[mine], digits[mine])
            for name, table in tables.items():
                table.push(gradients[name] / np.float32(len(batch)))
            store.tick()
            total, count = total + loss, count + len(mine)
        losses.append(total / count)
        print(f"worker {store.rank} of {store.num_workers}: epoch {epoch + 1:2}, loss {losses[-1]:.5f}", flush=True)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", metavar="ADDRESS", default=os.environ.get("SHOAL_SCHEDULER"), help="the scheduler")
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="passes over the digits (default: 10)")
    arguments = parser.parse_args()
    with shoal.connect(arguments.cluster) if arguments.cluster else shoal.local() as store:
        train(store, arguments.epochs)
