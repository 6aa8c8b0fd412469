"""The keys under which indicators reach loggers: stable, as dashboards are built on them."""

#: Key -> the indicator whose largest value over heads, by size, it is at a sampled step.
LOGGED_KEYS: dict[str, str] = {
    "guardbit/w_q_spectral_norm": "w_q_spectral_norm",
    "guardbit/max_logit": "max_logit",
    "guardbit/multiple_maxima": "multiple_maxima",
    "guardbit/delta_bias_cumulative": "delta_bias_cumulative",
    "guardbit/dq_relative_error": "dq_relative_error",
    "guardbit/loss": "loss",
    "guardbit/grad_norm": "grad_norm",
}
