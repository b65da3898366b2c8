"""KDA in numpy float64, one token at a time, with its gradient worked out by hand; and the inputs of its tests."""

import numpy as np

NAMES = ("q", "k", "v", "g", "beta", "state")


def reference_forward(q, k, v, g, beta, state):
    """Outputs [B, T, H, V] and the state before each token and after the last, [T + 1, B, H, K, V]."""
    q, k, v, g, beta, state = (np.asarray(x).astype(np.float64) for x in (q, k, v, g, beta, state))
    states, outs = [state], []
    for t in range(q.shape[1]):
        state = np.exp(g[:, t])[..., None] * state
        error = v[:, t] - np.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + np.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], error)
        outs.append(np.einsum("bhkv,bhk->bhv", state, q[:, t]))
        states.append(state)
    return np.stack(outs, 1), np.stack(states)


def reference_gradients(q, k, v, g, beta, state, d_out, d_state):
    """Gradients of sum(d_out * outputs) + sum(d_state * final state) in the order of `NAMES`."""
    q, k, v, g, beta = (np.asarray(x).astype(np.float64) for x in (q, k, v, g, beta))
    _, states = reference_forward(q, k, v, g, beta, state)
    grads = {name: np.zeros_like(x) for name, x in zip(NAMES, (q, k, v, g, beta), strict=False)}
    d_state = np.asarray(d_state, np.float64)
    for t in reversed(range(q.shape[1])):
        decayed = np.exp(g[:, t])[..., None] * states[t]
        error = v[:, t] - np.einsum("bhkv,bhk->bhv", decayed, k[:, t])
        grads["q"][:, t] = np.einsum("bhkv,bhv->bhk", states[t + 1], d_out[:, t])
        d_state = d_state + np.einsum("bhk,bhv->bhkv", q[:, t], d_out[:, t])
        from_error = np.einsum("bhkv,bhv->bhk", d_state, error)
        grads["beta"][:, t] = np.einsum("bhk,bhk->bh", k[:, t], from_error)
        d_error = beta[:, t, :, None] * np.einsum("bhkv,bhk->bhv", d_state, k[:, t])
        grads["v"][:, t] = d_error
        grads["k"][:, t] = beta[:, t, :, None] * from_error - np.einsum("bhkv,bhv->bhk", decayed, d_error)
        d_decayed = d_state - np.einsum("bhk,bhv->bhkv", k[:, t], d_error)
        grads["g"][:, t] = np.sum(d_decayed * decayed, axis=-1)
        d_state = np.exp(g[:, t])[..., None] * d_decayed
    return (*grads.values(), d_state)


def random_inputs(seed, num_tokens, gate="uniform", batch=2, heads=3, key_dim=5, value_dim=7):
    """Float32 inputs like those of a layer: unit keys and queries, beta in (0, 1), a state that is not zero.

    Args:
      gate: "bound" (-5 everywhere), "uniform" in (-5, 0), "weak" (about -0.01) or "strong" (-50 everywhere).
    """
    rng = np.random.default_rng(seed)
    lead = (batch, num_tokens, heads)
    q, k = (rng.standard_normal((*lead, key_dim)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = {
        "bound": lambda: np.full((*lead, key_dim), -5.0),
        "uniform": lambda: rng.uniform(-5, 0, (*lead, key_dim)),
        "weak": lambda: rng.uniform(-0.02, 0, (*lead, key_dim)),
        "strong": lambda: np.full((*lead, key_dim), -50.0),
    }[gate]()
    v, state = (
        rng.standard_normal((*lead, value_dim)),
        rng.standard_normal((batch, heads, key_dim, value_dim)),
    )
    beta = rng.uniform(0.02, 0.98, lead)
    return tuple(x.astype(np.float32) for x in (q * key_dim**-0.5, k, v, g, beta, state))
