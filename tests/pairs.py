"""What the tests and benches of the mapping share: its fields, and pairs of engines that mostly fit."""

from hypothesis import strategies as st

import disagg

FIELDS = (
    "target_tp_rank",
    "target_tp_ranks",
    "target_cp_ranks",
    "target_pp_ranks",
    "required_dst_info_num",
    "required_prefill_response_num",
)
"""What a RankMapping says, in the reference and in SGLang's PrefillServerInfo too."""
kinds = st.sampled_from(["mha", "mla", "hybrid_mla"])


@st.composite
def fitting_pairs(draw, largest=512):
    """A decode rank and a prefill engine with TP sizes of which one divides the other, and stages that line up."""
    small = draw(st.integers(1, max(1, largest // 8)))
    large = small * draw(st.integers(1, largest // small))
    local, remote = draw(st.sampled_from([(small, large), (large, small), (small, small)]))
    stages = draw(st.sampled_from([1, 1, 2, 3]))
    own_stages = draw(st.sampled_from([1, stages]))
    decode = disagg.DecodeRank(
        attn_tp_size=local,
        engine_rank=draw(st.integers(0, 2 * local)),
        pp_size=own_stages,
        pp_rank=draw(st.integers(0, own_stages - 1)),
        kv=draw(kinds),
        all_cp_ranks=draw(st.sampled_from([None, True, False])),
    )
    prefill = disagg.PrefillInfo(
        attn_tp_size=remote,
        attn_cp_size=draw(st.sampled_from([1, 1, 2, 4])),
        pp_size=stages,
        dp_size=draw(st.sampled_from([1, 2, 5])),
        enable_dsa_cache_layer_split=draw(st.booleans()),
        enable_kv_cache_sharding=draw(st.booleans()) and draw(st.booleans()),
    )
    return decode, prefill
