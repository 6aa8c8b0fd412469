"""The ops under PyTorch's `varlen_attn`, on the CPU."""

import torch

from tests.flash_stand_in.attention import Asked, backward, forward


def aten_kernels():
    """Gives the ops under `varlen_attn` kernels for the CPU; returns what takes them back."""
    library = torch.library.Library("aten", "IMPL")

    def flash_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None,
        seqused_k=None, alibi_slopes=None, **others,
    ):  # fmt: skip
        assert dropout_p == 0 and max_q >= cum_seq_q.diff().max() and seqused_k is None
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        asked = Asked(scale, is_causal, window_size_left, window_size_right)
        out, lse, state = forward(query, key, value, cum_seq_q, cum_seq_k, asked)
        return out, lse, state.view(torch.uint64), query.new_empty(0), query.new_empty(0)

    def flash_backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
        dropout_p, is_causal, rng_state, unused, *, scale=None, window_size_left=None,
        window_size_right=None,
    ):  # fmt: skip
        assert logsumexp.shape == (query.shape[1], len(query))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        asked = Asked(scale, is_causal, window_size_left, window_size_right)
        starts = cum_seq_q, cum_seq_k
        return backward(grad_out, query, key, value, out, logsumexp, *starts, asked)[:3]

    def cudnn_forward(
        query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, compute_log_sumexp,
        dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None, **others,
    ):  # fmt: skip
        assert attn_bias is None and compute_log_sumexp
        out, lse, *rest = flash_forward(
            query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
            return_debug_mask, scale=scale, window_size_left=-1, window_size_right=-1,
        )  # fmt: skip
        state = rest[0][:1]
        return out, lse, cum_seq_q, cum_seq_k, max_q, max_k, state, state, rest[1]

    def cudnn_backward(
        grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias,
        cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None,
    ):  # fmt: skip
        return flash_backward(
            grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
            dropout_p, is_causal, philox_seed, philox_offset, scale=scale, window_size_left=-1,
            window_size_right=-1,
        )  # fmt: skip

    library.impl("_cudnn_attention_forward", cudnn_forward, "CPU")
    library.impl("_cudnn_attention_backward", cudnn_backward, "CPU")
    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    return library._destroy
