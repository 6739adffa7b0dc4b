"""Bugs of rank mapping to put back into the reference model, one at a time (run by mutations.py)."""

from mutation_row import Mutation

FILE = "python/disagg/reference/mapping.py"
SERVE = "python/disagg/reference/serving.py"

MAPPING = [
    Mutation(
        "reference-real-rank-is-the-last",
        "A1-01: the decode rank reads the last rank of its block",
        FILE,
        "return block[0], block, 1,",
        "return block[-1], block, 1,",
    ),
    Mutation(
        "reference-dummies-counted-as-answers",
        "A1-01: waits for the whole block, of which one rank sends",
        FILE,
        '1 if decode.kv == "mla" else p // d',
        "p // d",
    ),
    Mutation(
        "reference-blocks-are-strided",
        "A1-01, the proposal of #5887: every n-th rank instead of a block",
        FILE,
        "block = tuple(range(r * p // d, (r + 1) * p // d))",
        "block = tuple(range(r, p, d))",
    ),
    Mutation(
        "reference-replicated-means-complete",
        "A1-06: one rank is taken to hold everything",
        FILE,
        'return block[0], block, 1, 1 if decode.kv == "mla" else p // d',
        "return block[0], block[:1], 1, 1",
    ),
    Mutation(
        "reference-sources-are-dealt-in-turn",
        "A1-02: the source is rank mod P instead of a run of neighbours",
        FILE,
        "return r // (d // p), (r // (d // p),), d // p, 1",
        "return r % p, (r % p,), d // p, 1",
    ),
    Mutation(
        "reference-destinations-not-multiplied",
        "A1-02: a prefill rank that several decode ranks read waits for one of them only",
        FILE,
        "(r // (d // p),), d // p, 1",
        "(r // (d // p),), 1, 1",
    ),
    Mutation(
        "reference-hybrid-answers-as-mla",
        "A1-14: hybrid_mla counts one answer of a block",
        FILE,
        '1 if decode.kv == "mla" else p // d',
        '1 if decode.kv != "mha" else p // d',
    ),
    Mutation(
        "reference-engine-rank-is-the-tp-rank",
        "A1-15: the rank in the whole engine is taken for the rank in its attention-TP group",
        FILE,
        "r = decode.engine_rank % d",
        "r = decode.engine_rank",
    ),
    Mutation(
        "reference-sharding-with-cp-acts-in-tp",
        "DESIGN.md section 5: sharding with CP above 1 belongs to CP",
        FILE,
        " and prefill.enable_kv_cache_sharding and prefill.attn_cp_size == 1",
        " and prefill.enable_kv_cache_sharding",
    ),
    Mutation(
        "reference-sharding-not-seen-in-tp",
        "DESIGN.md section 5: each rank holds other pages, and one of them is read",
        FILE,
        "        return None, tuple(range(p)), d, p\n",
        "        return r, (r,), 1, 1\n",
    ),
    Mutation(
        "reference-sharded-ranks-wait-for-one",
        "DESIGN.md section 5: a sharded rank waits for one decode rank, and all of them come",
        FILE,
        "return None, tuple(range(p)), d, p",
        "return None, tuple(range(p)), 1, p",
    ),
    Mutation(
        "reference-sharding-ignored-in-cp",
        "DESIGN.md section 5: sharded CP ranks own other pages",
        FILE,
        "prefill.enable_dsa_cache_layer_split or prefill.enable_kv_cache_sharding:",
        "prefill.enable_dsa_cache_layer_split:",
    ),
    Mutation(
        "reference-layer-split-ignored",
        "DESIGN.md section 5: CP ranks that own layers must all be read",
        FILE,
        "wants_all or prefill.enable_dsa_cache_layer_split or ",
        "wants_all or ",
    ),
    Mutation(
        "reference-all-cp-ranks-ignored",
        "A1-10, A1-12: the decode rank's own wish for all CP ranks",
        FILE,
        "if wants_all or prefill",
        "if prefill",
    ),
    Mutation(
        "reference-hybrid-reads-one-cp-rank",
        "A1-14: hybrid_mla always reads every CP rank",
        FILE,
        'decode.kv == "hybrid_mla" if decode.all_cp_ranks is None else decode.all_cp_ranks',
        "bool(decode.all_cp_ranks)",
    ),
    Mutation(
        "reference-all-cp-ranks-false-not-obeyed",
        "DESIGN.md section 5: False is taken as said, for hybrid_mla too",
        FILE,
        'decode.kv == "hybrid_mla" if decode.all_cp_ranks is None else decode.all_cp_ranks',
        'decode.kv == "hybrid_mla" or decode.all_cp_ranks',
    ),
    Mutation(
        "reference-answers-without-cp",
        "A1-10: all CP ranks are read and the answers of one are awaited",
        FILE,
        "answers * len(cp_ranks) * len(pp_ranks)",
        "answers * len(pp_ranks)",
    ),
    Mutation(
        "reference-answers-without-pp",
        "A1-08: all stages are read and the answers of one are awaited",
        FILE,
        "answers * len(cp_ranks) * len(pp_ranks)",
        "answers * len(cp_ranks)",
    ),
    Mutation(
        "reference-earlier-stages-first",
        "A1-09: contact order by ascending stage",
        FILE,
        "sorted(self.target_pp_ranks, reverse=True)",
        "sorted(self.target_pp_ranks)",
    ),
    Mutation(
        "reference-equal-stages-read-all",
        "A1-08: stages that line up one to one are read all",
        FILE,
        "    if decode.pp_size == prefill.pp_size:\n        return (decode.pp_rank,)\n",
        "",
    ),
    Mutation(
        "reference-one-stage-of-many",
        "A1-08: a decode engine without stages reads one stage only",
        FILE,
        "    return tuple(range(prefill.pp_size))",
        "    return (decode.pp_rank,)",
    ),
]

HEADS = [
    Mutation(
        "reference-heads-cycle",
        "A1-05: replicated heads dealt 0,1,0,1 instead of 0,0,1,1",
        FILE,
        "return (rank * num_kv_heads // tp_size,)",
        "return (rank % num_kv_heads,)",
    ),
    Mutation(
        "reference-heads-all-zero",
        "A1-05: integer division gives 0 heads per rank, so every rank holds head 0",
        FILE,
        "return (rank * num_kv_heads // tp_size,)",
        "return (rank * (num_kv_heads // tp_size),)",
    ),
    Mutation(
        "reference-replicas-counted-as-heads",
        "A1-04: total heads as heads per rank x TP, which counts each replica as a head of its own",
        FILE,
        "return (rank * num_kv_heads // tp_size,)",
        "return (rank,)",
    ),
    Mutation(
        "reference-head-total-from-local-heads",
        "A1-04: the check asks about heads per rank x TP instead of the true total",
        FILE,
        "    heads = decode.num_kv_heads\n",
        "    heads = decode.num_kv_heads and max(1, decode.num_kv_heads // d) * d\n",
    ),
    Mutation(
        "reference-heads-checked-at-decode-only",
        "A1-04: the prefill side's partition is not checked",
        FILE,
        "None in (kv_heads(heads, d, 0), kv_heads(heads, p, 0))",
        "kv_heads(heads, d, 0) is None",
    ),
    Mutation(
        "reference-heads-checked-at-prefill-only",
        "A1-05: the decode side's partition is not checked",
        FILE,
        "None in (kv_heads(heads, d, 0), kv_heads(heads, p, 0))",
        "kv_heads(heads, p, 0) is None",
    ),
    Mutation(
        "reference-heads-checked-for-mla",
        "a latent has no heads to deal out",
        FILE,
        'if decode.kv != "mla" and heads is not None',
        "if heads is not None",
    ),
]

CHECKS = [
    Mutation(
        "reference-floor-instead-of-refusal",
        "A1-07: plain integer division without a check",
        FILE,
        "elif max(d, p) % min(d, p) != 0:",
        "elif min(d, p) == 0:",
    ),
    Mutation(
        "reference-warnings-refuse",
        "A1-03: a pair with warnings only is slow and maps",
        FILE,
        "if any(reason.severity is Severity.FATAL for reason in reasons):",
        "if reasons:",
    ),
    Mutation(
        "reference-equal-tp-not-required",
        "A1-13: a cache that cannot be sliced hangs when sending instead of being refused",
        FILE,
        "if decode.requires_equal_tp and d != p:",
        'if decode.requires_equal_tp and d > p and decode.kv == "mha":',
    ),
    Mutation(
        "reference-only-the-first-difference",
        "DESIGN.md section 5: all differences at once",
        FILE,
        "        *_contact_reasons(decode, prefill),\n    ]",
        "        *_contact_reasons(decode, prefill),\n    ][:1]",
    ),
    Mutation(
        "reference-decode-stages-unchecked",
        "A1-08: decode stages that do not line up",
        FILE,
        "if ours not in (1, theirs):",
        "if ours > theirs:",
    ),
    Mutation(
        "reference-decode-cp-unchecked",
        "DESIGN.md section 5: decode CP must be 1, equal sizes too",
        FILE,
        "if decode.attn_cp_size != 1:",
        "if decode.attn_cp_size not in (1, prefill.attn_cp_size):",
    ),
    Mutation(
        "reference-contacts-counted-without-cp",
        "A1-17: the limit of contacts does not see CP",
        FILE,
        "count = block * len(_cp(decode, prefill)) * len(_pp(decode, prefill))",
        "count = block * len(_pp(decode, prefill))",
    ),
    Mutation(
        "reference-contacts-limit-is-off-by-one",
        "DESIGN.md section 5: 4,096 contacts are allowed",
        FILE,
        "if count > MAX_CONTACTS:",
        "if count >= MAX_CONTACTS:",
    ),
]

SERVING = [
    Mutation(
        "reference-served-dummies-are-real",
        "A1-01: a dummy sends data that nobody reads",
        SERVE,
        'ServedRanks("dummy" if dummy else "real", ',
        'ServedRanks("real", ',
    ),
    Mutation(
        "reference-served-cp-ranks-all-wait",
        "A1-10: a CP rank that nobody contacts waits for a decode rank until its timeout",
        SERVE,
        "place = (cp_rank, tp_rank, pp_rank)",
        "place = (0, tp_rank, pp_rank)",
    ),
    Mutation(
        "reference-served-one-reader-of-many",
        "A1-02: a prefill rank goes on after the first of its decode ranks has come",
        SERVE,
        "stage, len(readers))",
        "stage, 1)",
    ),
]

REFERENCE = [*MAPPING, *HEADS, *CHECKS, *SERVING]
