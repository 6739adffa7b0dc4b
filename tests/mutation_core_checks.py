"""Bugs of the core's compatibility check and head partition to put back, one at a time (run by mutations.py)."""

from mutation_row import Mutation

MAPPING = "rust/core/src/rank_mapping.rs"
COMPAT = "rust/core/src/compat.rs"
TOPOLOGY = "rust/core/src/topology.rs"

HEADS = [
    Mutation(
        "core-heads-cycle",
        "A1-05: replicated heads dealt 0,1,0,1 instead of 0,0,1,1",
        MAPPING,
        "let head = rank / (tp_size / num_kv_heads);",
        "let head = rank % num_kv_heads;",
    ),
    Mutation(
        "core-heads-all-zero",
        "A1-05: integer division gives 0 heads per rank, so every rank holds head 0",
        MAPPING,
        "let head = rank / (tp_size / num_kv_heads);",
        "let head = rank * (num_kv_heads / tp_size);",
    ),
    Mutation(
        "core-replicas-counted-as-heads",
        "A1-04: total heads as heads per rank x TP, which counts each replica as a head of its own",
        MAPPING,
        "let head = rank / (tp_size / num_kv_heads);",
        "let head = rank;",
    ),
    Mutation(
        "core-no-heads-where-replicated",
        "A1-05: integer division without looking at replicas: no head at all",
        MAPPING,
        "if num_kv_heads.is_multiple_of(tp_size) {",
        "if num_kv_heads.is_multiple_of(tp_size) || num_kv_heads < tp_size {",
    ),
    Mutation(
        "core-head-total-from-local-heads",
        "A1-04: the check asks about heads per rank x TP instead of the true total, and that always divides",
        COMPAT,
        "&& let Some(heads) = decode.spec().num_kv_heads\n",
        "&& let Some(heads) = decode.spec().num_kv_heads.map(|heads| (heads / local).max(1) * local)\n",
    ),
    Mutation(
        "core-heads-checked-at-decode-only",
        "A1-04: the prefill side's partition is not checked",
        COMPAT,
        "[local, remote].map(|tp| kv_head_range",
        "[local, local].map(|tp| kv_head_range",
    ),
    Mutation(
        "core-heads-checked-at-prefill-only",
        "A1-05: the decode side's partition is not checked",
        COMPAT,
        "[local, remote].map(|tp| kv_head_range",
        "[remote, remote].map(|tp| kv_head_range",
    ),
    Mutation(
        "core-heads-checked-for-mla",
        "a latent has no heads to deal out",
        COMPAT,
        "if decode.kv() != KvKind::Mla\n        && let Some(heads)",
        "if let Some(heads)",
    ),
    Mutation(
        "core-heads-unchecked-for-hybrid",
        "A1-14: hybrid_mla has per-head state too",
        COMPAT,
        "if decode.kv() != KvKind::Mla\n        && let Some(heads)",
        "if decode.kv() == KvKind::Mha\n        && let Some(heads)",
    ),
]

CHECKS = [
    Mutation(
        "core-floor-instead-of-refusal",
        "A1-07: plain integer division without a check: reads a rank that does not exist, or never reads some",
        COMPAT,
        "} else if !local.is_multiple_of(remote) && !remote.is_multiple_of(local) {",
        "} else if local == 0 {",
    ),
    Mutation(
        "core-only-larger-decode-may-divide",
        "A1-02: one direction of unequal TP is refused although it divides",
        COMPAT,
        "} else if !local.is_multiple_of(remote) && !remote.is_multiple_of(local) {",
        "} else if !local.is_multiple_of(remote) {",
    ),
    Mutation(
        "core-map-without-check",
        "A1-07, A1-08: the mapping does not ask the check",
        MAPPING,
        "    compat::refuse_incompatible(decode, prefill)?;\n    Ok(resolve(decode, prefill))",
        "    Ok(resolve(decode, prefill))",
    ),
    Mutation(
        "core-warnings-refuse",
        "A1-03: a pair with warnings only is slow and maps",
        COMPAT,
        "compatible &= severity == Severity::Warning;",
        "compatible &= severity != Severity::Warning && severity != Severity::Fatal;",
    ),
    Mutation(
        "core-fatal-differences-pass",
        "A1-07: a fatal difference is told and not acted on",
        COMPAT,
        "compatible &= severity == Severity::Warning;",
        "compatible |= severity == Severity::Warning;",
    ),
    Mutation(
        "core-unequal-tp-refused",
        "A1-02, A1-03: unequal TP of per-head caches is a warning",
        COMPAT,
        "unequal(ReasonKind::UnequalTp, Severity::Warning);",
        "unequal(ReasonKind::UnequalTp, Severity::Fatal);",
    ),
    Mutation(
        "core-equal-tp-not-required",
        "A1-13: a cache that cannot be sliced hangs when sending instead of being refused",
        COMPAT,
        "if decode.spec().requires_equal_tp {",
        "if decode.spec().requires_equal_tp && decode.kv() == KvKind::Mha && local > remote {",
    ),
    Mutation(
        "core-only-the-first-difference",
        "DESIGN.md section 5: all differences at once",
        COMPAT,
        "reasons.push(Reason { kind, severity, local: local.to_side(), remote: remote.to_side() });",
        "if reasons.is_empty() {\n"
        "            reasons.push(Reason { kind, severity, local: local.to_side(), remote: remote.to_side() });\n"
        "        }",
    ),
    Mutation(
        "core-decode-stages-unchecked",
        "A1-08: decode stages that do not line up",
        COMPAT,
        "if ours.pp_size != 1 && ours.pp_size != prefill.pp_size() {",
        "if ours.pp_size > prefill.pp_size() {",
    ),
    Mutation(
        "core-decode-cp-unchecked",
        "DESIGN.md section 5: decode CP must be 1, equal sizes too",
        COMPAT,
        "if ours.attn_cp_size != 1 {",
        "if ours.attn_cp_size != 1 && ours.attn_cp_size != prefill.attn_cp_size() {",
    ),
    Mutation(
        "core-contacts-counted-without-cp",
        "A1-17: the limit of contacts does not see CP, so an absurd mapping is built",
        MAPPING,
        "u64::from(block) * u64::from(cp) * u64::from(pp)",
        "u64::from(block) * u64::from(cp.min(1)) * u64::from(pp)",
    ),
    Mutation(
        "core-contacts-limit-is-off-by-one",
        "DESIGN.md section 5: 4,096 contacts are allowed",
        COMPAT,
        "if contacts > MAX_CONTACTS {",
        "if contacts >= MAX_CONTACTS {",
    ),
    Mutation(
        "core-sharded-contacts-counted-as-a-block",
        "A1-17: sharded MLA contacts every TP rank, not a block of them",
        MAPPING,
        "    let block = if is_tp_sharded(decode, prefill) {",
        "    let block = if is_tp_sharded(decode, prefill) && prefill.attn_tp_size() == 1 {",
    ),
    Mutation(
        "core-size-zero-accepted",
        "A1-17: a TP size of 0 is a division by zero in the scheduler's thread",
        TOPOLOGY,
        "if (1..=MAX_SIZE).contains(&size) {",
        "if (0..=MAX_SIZE).contains(&size) {",
    ),
    Mutation(
        "core-product-of-sizes-unbounded",
        "A1-17: sizes that are each possible and absurd together",
        TOPOLOGY,
        "if ranks <= MAX_RANKS {",
        "if ranks <= MAX_RANKS || sizes.len() == 4 {",
    ),
]

CORE_CHECKS = [*HEADS, *CHECKS]
