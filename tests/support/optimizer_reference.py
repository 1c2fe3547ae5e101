"""Adam, AdamW, LAMB and LARS in NumPy, in float64, from their papers: what both frameworks are compared with."""

from collections.abc import Iterator
from typing import Any

import numpy as np

DRAW = np.random.default_rng(5)
SHAPES = {"kernel": (4, 3), "bias": (4,), "convolution": (2, 3, 2, 2), "zeros": (3, 3)}
START = {name: DRAW.normal(size=shape) * (name != "zeros") for name, shape in SHAPES.items()}
GRADIENTS = [{name: DRAW.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(20)]
GRADIENTS[3]["convolution"] *= 0
LRS = [0.01 * (1 + step % 3) for step in range(20)]
EMA_DECAY = 0.9
CASES: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam"},
    "adam, decay": {"optimizer": "adam", "weight_decay": 0.1, "optimizer_args": {"betas": [0.8, 0.99], "eps": 1e-3}},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
    "lamb": {"optimizer": "lamb"},
    "lamb, decay": {"optimizer": "lamb", "weight_decay": 0.1, "optimizer_args": {"betas": [0.8, 0.99], "eps": 1e-3}},
    "lamb, all": {"optimizer": "lamb", "weight_decay": 0.1, "optimizer_args": {"exclude_1d": False}},
    "lars": {"optimizer": "lars"},
    "lars, momentum": {"optimizer": "lars", "momentum": 0.9, "weight_decay": 0.1},
    "lars, all": {
        "optimizer": "lars", "momentum": 0.9, "weight_decay": 0.1,
        "optimizer_args": {"exclude_1d": False, "trust_coefficient": 0.5},
    },
}  # fmt: skip


def weights(case: str) -> dict[str, np.ndarray]:
    """The weights after 20 updates."""
    given = {"betas": (0.9, 0.999), "eps": 1e-6 if CASES[case]["optimizer"] == "lamb" else 1e-8, "weight_decay": 0.0}
    given |= {"exclude_1d": True, "momentum": 0.0, "trust_coefficient": 0.001}
    given |= {**CASES[case], **CASES[case].get("optimizer_args", {})}
    update = {"adam": adam, "adamw": adamw, "lamb": lamb, "lars": lars}[CASES[case]["optimizer"]]
    ended = {}
    for name, start in START.items():
        w, state = start.copy(), {"m": np.zeros_like(start), "v": np.zeros_like(start)}
        for step, lr in enumerate(LRS):
            w = update(w, GRADIENTS[step][name], lr, step + 1, state, given)
        ended[name] = w
    return ended


def moments(g: np.ndarray, t: int, state: dict[str, Any], given: dict[str, Any]) -> np.ndarray:
    """Kingma and Ba 2015, algorithm 1: the corrected first moment over the root of the second."""
    b1, b2 = given["betas"]
    state["m"] = b1 * state["m"] + (1 - b1) * g
    state["v"] = b2 * state["v"] + (1 - b2) * g**2
    m_hat, v_hat = state["m"] / (1 - b1**t), state["v"] / (1 - b2**t)
    return m_hat / (np.sqrt(v_hat) + given["eps"])


def adam(w: np.ndarray, g: np.ndarray, lr: float, t: int, state: dict[str, Any], given: dict[str, Any]) -> np.ndarray:
    """With weight decay as the gradient of the penalty."""
    return w - lr * moments(g + given["weight_decay"] * w, t, state, given)


def adamw(w: np.ndarray, g: np.ndarray, lr: float, t: int, state: dict[str, Any], given: dict[str, Any]) -> np.ndarray:
    """Loshchilov and Hutter 2019, algorithm 2."""
    return w - lr * (moments(g, t, state, given) + given["weight_decay"] * w)


def lamb(w: np.ndarray, g: np.ndarray, lr: float, t: int, state: dict[str, Any], given: dict[str, Any]) -> np.ndarray:
    """You et al. 2020, algorithm 2."""
    r = moments(g, t, state, given)
    if w.ndim < 2 and given["exclude_1d"]:
        return w - lr * r
    u = r + given["weight_decay"] * w
    norms = np.linalg.norm(w), np.linalg.norm(u)
    return w - lr * (norms[0] / norms[1] if all(norms) else 1.0) * u


def lars(w: np.ndarray, g: np.ndarray, lr: float, t: int, state: dict[str, Any], given: dict[str, Any]) -> np.ndarray:
    """You et al. 2017, algorithm 1."""
    local, decay = 1.0, 0.0
    if w.ndim > 1 or not given["exclude_1d"]:
        decay = given["weight_decay"]
        norms = np.linalg.norm(w), np.linalg.norm(g)
        if all(norms):
            local = given["trust_coefficient"] * norms[0] / (norms[1] + decay * norms[0] + 1e-8)
    state["v"] = given["momentum"] * state["v"] + lr * local * (g + decay * w)
    return w - state["v"]


def averages(followed: Iterator[np.ndarray], start: np.ndarray) -> np.ndarray:
    """The moving average of the weights after each update, which begins at their start."""
    average = start
    for w in followed:
        average = EMA_DECAY * average + (1 - EMA_DECAY) * w
    return average
