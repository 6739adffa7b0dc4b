"""Bugs of the core's rank mapping to put back, one at a time (run by mutations.py)."""

from mutation_row import Mutation

MAPPING = "rust/core/src/rank_mapping.rs"
SERVE = "rust/core/src/rank_mapping/serve.rs"
TOPOLOGY = "rust/core/src/topology.rs"

TP_SIDE = [
    Mutation(
        "core-real-rank-is-the-last",
        "A1-01: the decode rank reads the last rank of its block, the others are told that the first is read",
        MAPPING,
        "real: Some(rank * block),",
        "real: Some(rank * block + block - 1),",
    ),
    Mutation(
        "core-dummies-counted-as-answers",
        "A1-01: waits for the whole block, of which one rank sends: the state never completes",
        MAPPING,
        "answers: if decode.kv() == KvKind::Mla { 1 } else { block },",
        "answers: block,",
    ),
    Mutation(
        "core-dummies-not-contacted",
        "A1-01: the unused ranks of the block never hear from the decode rank",
        MAPPING,
        "ranks: RankRange { first: rank * block, count: block },",
        "ranks: RankRange { first: rank * block, count: if decode.kv() == KvKind::Mla { 1 } else { block } },",
    ),
    Mutation(
        "core-replicated-means-complete",
        "A1-06: one rank is taken to hold everything, so it alone is read",
        MAPPING,
        "        ranks: RankRange { first: rank * block, count: block },\n"
        "        destinations: 1,\n"
        "        answers: if decode.kv() == KvKind::Mla { 1 } else { block },",
        "        ranks: RankRange { first: rank * block, count: 1 },\n        destinations: 1,\n        answers: 1,",
    ),
    Mutation(
        "core-blocks-overlap",
        "A1-01: the block starts at the decode rank's own number (with a stride of 1 instead of the block's size)",
        MAPPING,
        "        real: Some(rank * block),\n        ranks: RankRange { first: rank * block, count: block },",
        "        real: Some(rank),\n        ranks: RankRange { first: rank, count: block },",
    ),
    Mutation(
        "core-contacts-are-strided",
        "A1-01, the proposal of #5887: a decode rank is paired with every n-th rank instead of a block",
        MAPPING,
        "let tp = self.target_tp_ranks.first + index / stages % block;",
        "let tp = self.target_tp_ranks.first / block + index / stages % block * 2;",
    ),
    Mutation(
        "core-sources-are-dealt-in-turn",
        "A1-02: with more decode ranks than prefill ranks the source is rank mod P instead of a run of neighbours",
        MAPPING,
        "let source = rank / per_source;",
        "let source = rank % remote;",
    ),
    Mutation(
        "core-destinations-not-multiplied",
        "A1-02: a prefill rank that several decode ranks read waits for one of them only",
        MAPPING,
        "destinations: per_source,",
        "destinations: 1,",
    ),
    Mutation(
        "core-destinations-of-a-block-multiplied",
        "A1-02: a prefill rank that one decode rank reads waits for as many as the block is long",
        MAPPING,
        "        destinations: 1,\n        answers: if",
        "        destinations: block,\n        answers: if",
    ),
    Mutation(
        "core-answers-count-the-destinations",
        "A1-02: the two counts swapped: a decode rank waits for as many answers as its source has destinations",
        MAPPING,
        "            destinations: per_source,\n            answers: 1,",
        "            destinations: per_source,\n            answers: per_source,",
    ),
    Mutation(
        "core-hybrid-answers-as-mla",
        "A1-14: hybrid_mla counts one answer of a block, though each rank holds state of its own",
        MAPPING,
        "answers: if decode.kv() == KvKind::Mla {",
        "answers: if decode.kv() != KvKind::Mha {",
    ),
    Mutation(
        "core-mha-answers-as-mla",
        "A1-02: one answer of a block of per-head ranks: the request is ready before its bytes are there (A1-06)",
        MAPPING,
        "answers: if decode.kv() == KvKind::Mla { 1 } else { block },",
        "answers: if block > 0 { 1 } else { block },",
    ),
    Mutation(
        "core-engine-rank-is-the-tp-rank",
        "A1-15: the rank in the whole engine, over its dp groups, is taken for the rank in its attention-TP group",
        TOPOLOGY,
        "self.spec.engine_rank % self.spec.attn_tp_size",
        "self.spec.engine_rank",
    ),
]

SHARDING = [
    Mutation(
        "core-sharding-with-cp-acts-in-tp",
        "DESIGN.md section 5: sharding with CP above 1 belongs to CP",
        MAPPING,
        " && prefill.spec().enable_kv_cache_sharding && prefill.attn_cp_size() == 1",
        " && prefill.spec().enable_kv_cache_sharding",
    ),
    Mutation(
        "core-sharding-acts-without-mla",
        "DESIGN.md section 5: only a latent is sharded over TP",
        MAPPING,
        "decode.kv() == KvKind::Mla && prefill.spec().enable_kv_cache_sharding",
        "prefill.spec().enable_kv_cache_sharding",
    ),
    Mutation(
        "core-sharding-not-seen-in-tp",
        "DESIGN.md section 5: each rank holds other pages, and one of them is read",
        MAPPING,
        "decode.kv() == KvKind::Mla && prefill.spec().enable_kv_cache_sharding",
        "decode.kv() == KvKind::HybridMla && prefill.spec().enable_kv_cache_sharding",
    ),
    Mutation(
        "core-sharded-ranks-wait-for-one",
        "DESIGN.md section 5: a sharded rank waits for one decode rank, and all of them come",
        MAPPING,
        "destinations: local,",
        "destinations: 1,",
    ),
    Mutation(
        "core-sharded-ranks-have-one-real",
        "DESIGN.md section 5: no sharded rank is the real one, all are read",
        MAPPING,
        "real: None,",
        "real: Some(rank),",
    ),
    Mutation(
        "core-sharded-answers-counted-once",
        "DESIGN.md section 5: every sharded rank answers",
        MAPPING,
        "answers: remote,",
        "answers: 1,",
    ),
    Mutation(
        "core-sharding-ignored-in-cp",
        "DESIGN.md section 5: sharded CP ranks own other pages, so all of them are read",
        MAPPING,
        "spec.enable_dsa_cache_layer_split || spec.enable_kv_cache_sharding;",
        "spec.enable_dsa_cache_layer_split;",
    ),
]

CP_AND_PP = [
    Mutation(
        "core-layer-split-ignored",
        "DESIGN.md section 5: CP ranks that own layers must all be read",
        MAPPING,
        "decode.pulls_all_cp_ranks() || spec.enable_dsa_cache_layer_split || ",
        "decode.pulls_all_cp_ranks() || ",
    ),
    Mutation(
        "core-all-cp-ranks-ignored",
        "A1-10, A1-12: the decode rank's own wish for all CP ranks",
        MAPPING,
        "decode.pulls_all_cp_ranks() || spec.enable",
        "spec.enable",
    ),
    Mutation(
        "core-all-cp-ranks-read-always",
        "A1-10: CP ranks without a part of their own are read too",
        MAPPING,
        "count: if all { spec.attn_cp_size } else { 1 }",
        "count: if all || spec.attn_cp_size > 1 { spec.attn_cp_size } else { 1 }",
    ),
    Mutation(
        "core-hybrid-reads-one-cp-rank",
        "A1-14: hybrid_mla always reads every CP rank",
        TOPOLOGY,
        "unwrap_or(matches!(self.spec.kv, KvKind::HybridMla))",
        "unwrap_or(false)",
    ),
    Mutation(
        "core-all-cp-ranks-false-not-obeyed",
        "DESIGN.md section 5: False is taken as said, for hybrid_mla too",
        TOPOLOGY,
        "self.spec.all_cp_ranks.unwrap_or(matches!(self.spec.kv, KvKind::HybridMla))",
        "self.spec.all_cp_ranks == Some(true) || matches!(self.spec.kv, KvKind::HybridMla)",
    ),
    Mutation(
        "core-answers-without-cp",
        "A1-10: all CP ranks are read and the answers of one are awaited",
        MAPPING,
        "tp.answers * target_cp_ranks.count * target_pp_ranks.count",
        "tp.answers * target_pp_ranks.count",
    ),
    Mutation(
        "core-answers-without-pp",
        "A1-08: all stages are read and the answers of one are awaited",
        MAPPING,
        "tp.answers * target_cp_ranks.count * target_pp_ranks.count",
        "tp.answers * target_cp_ranks.count",
    ),
    Mutation(
        "core-earlier-stages-first",
        "A1-09: contact order by ascending stage: a stage sees a request before the stages behind it",
        MAPPING,
        "(stages - 1 - index % stages)",
        "(index % stages)",
    ),
    Mutation(
        "core-stage-by-stage-contact-order",
        "A1-09: contact order by stage before TP rank",
        MAPPING,
        "let tp = self.target_tp_ranks.first + index / stages % block;",
        "let tp = self.target_tp_ranks.first + index % block;",
    ),
    Mutation(
        "core-equal-stages-read-all",
        "A1-08: stages that line up one to one are read all, and some hold nothing for this rank",
        MAPPING,
        "    if spec.pp_size == prefill.pp_size() {\n        return RankRange { first: spec.pp_rank, count: 1 };",
        "    if prefill.pp_size() == 1 {\n        return RankRange { first: 0, count: 1 };",
    ),
    Mutation(
        "core-first-stage-for-every-stage",
        "A1-08: each decode stage reads the first prefill stage",
        MAPPING,
        "RankRange { first: spec.pp_rank, count: 1 }",
        "RankRange { first: 0, count: 1 }",
    ),
    Mutation(
        "core-one-stage-of-many",
        "A1-08: a decode engine without stages reads the first stage only",
        MAPPING,
        "RankRange { first: 0, count: prefill.pp_size() }",
        "RankRange { first: 0, count: 1 }",
    ),
]

SERVED = [
    Mutation(
        "core-served-dummies-are-real",
        "A1-01: a dummy sends what another rank sends too",
        SERVE,
        "if decode.kv() == KvKind::Mla && !rank.tp.is_multiple_of(block) {",
        "if decode.kv() == KvKind::HybridMla && !rank.tp.is_multiple_of(block) {",
    ),
    Mutation(
        "core-served-real-rank-is-the-last",
        "A1-01: the two sides differ in who of a block sends",
        SERVE,
        "!rank.tp.is_multiple_of(block)",
        "!(rank.tp + 1).is_multiple_of(block)",
    ),
    Mutation(
        "core-served-cp-ranks-all-wait",
        "A1-10: CP ranks that nobody reads wait until their timeout",
        SERVE,
        "if rank.cp >= cp_ranks(decode, prefill).count {",
        "if rank.cp >= prefill.attn_cp_size() {",
    ),
    Mutation(
        "core-served-readers-not-multiplied",
        "A1-02: a prefill rank knows one of the decode ranks that read it",
        SERVE,
        "served(rank.tp * per_source, per_source)",
        "served(rank.tp * per_source, 1)",
    ),
    Mutation(
        "core-served-readers-are-strided",
        "A1-01: the reader of a block is rank mod D",
        SERVE,
        "let reader = served(rank.tp / block, 1);",
        "let reader = served(rank.tp % local, 1);",
    ),
    Mutation(
        "core-served-stage-is-its-own",
        "A1-08: a decode engine without stages reads every stage from its only one",
        SERVE,
        "{ rank.pp } else { 0 };",
        "{ rank.pp } else { rank.pp % prefill.pp_size() };",
    ),
    Mutation(
        "core-served-sharding-not-seen",
        "DESIGN.md section 5: every decode rank reads every sharded rank",
        SERVE,
        "if is_tp_sharded(decode, prefill) {",
        "if is_tp_sharded(decode, prefill) && remote == 1 {",
    ),
    Mutation(
        "core-served-only-first-cp-rank",
        "A1-10: with all CP ranks read, only the first waits",
        SERVE,
        "if rank.cp >= cp_ranks(decode, prefill).count {",
        "if rank.cp > 0 {",
    ),
    Mutation(
        "core-served-hybrid-has-dummies",
        "A1-14: hybrid_mla treated as mla",
        SERVE,
        "if decode.kv() == KvKind::Mla && !rank.tp.is_multiple_of(block) {",
        "if decode.kv() != KvKind::Mha && !rank.tp.is_multiple_of(block) {",
    ),
    Mutation(
        "core-served-first-stage-always",
        "A1-08: stages that line up read their own",
        SERVE,
        "if decode.spec().pp_size == prefill.pp_size() { rank.pp } else { 0 }",
        "0",
    ),
    Mutation(
        "core-served-without-check",
        "A1-07: the inverse of a pair that does not fit",
        SERVE,
        "    compat::refuse_incompatible(decode, prefill)?;\n",
        "",
    ),
]

CORE_MAPPING = [*TP_SIDE, *SHARDING, *CP_AND_PP, *SERVED]
