//! Nanoseconds of the mapping and the check, without Python. `cargo bench -p disagg-core`; `cargo test` runs each once.

use std::hint::black_box;

use criterion::Criterion;
use disagg_core::compat::{self, ReasonKind};
use disagg_core::rank_mapping::{
    DecodeRanks, PrefillRank, RankMapping, RankRange, ServedRanks, map_ranks, serve_ranks,
};
use disagg_core::topology::{DecodeRank, DecodeRankSpec, KvKind, PrefillInfo, PrefillInfoSpec};

// Not criterion_group!: it makes public functions, which would need docs.
fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    map_one(&mut criterion);
    check_one(&mut criterion);
    whole_engines(&mut criterion);
    criterion.final_summary();
}

fn map_one(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("map_ranks");
    let pairs = [
        (
            "tp 8 onto tp 8",
            decode(8, 5, KvKind::Mha),
            prefill(8, 1, 1),
            mapping([(5, 1), (0, 1), (0, 1)], 1, 1),
        ),
        (
            "tp 4 onto tp 16, mla",
            decode(4, 1, KvKind::Mla),
            prefill(16, 1, 1),
            mapping([(4, 4), (0, 1), (0, 1)], 1, 1),
        ),
        (
            "tp 1 onto tp 32 cp 8 pp 8, hybrid_mla",
            decode(1, 0, KvKind::HybridMla),
            prefill(32, 8, 8),
            mapping([(0, 32), (0, 8), (0, 8)], 1, 2048),
        ),
    ];
    for (name, decode, prefill, expected) in pairs {
        group.bench_function(name, |bench| {
            bench.iter(|| map_ranks(black_box(&decode), black_box(&prefill)));
        });
        assert_eq!(map_ranks(&decode, &prefill), Ok(expected), "{name}");
    }
}

fn check_one(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("compat::check");
    let odd = prefill_of(PrefillInfoSpec {
        attn_tp_size: 3,
        page_size: Some(32),
        kv_cache_dtype: Some("fp8_e4m3".to_string()),
        ..Default::default()
    });
    let pairs = [
        ("no difference", prefill(8, 1, 1), vec![]),
        (
            "three differences",
            odd,
            vec![ReasonKind::PageSize, ReasonKind::KvCacheDtype, ReasonKind::TpDivisibility],
        ),
    ];
    let decode = decode(8, 5, KvKind::Mla);
    for (name, prefill, expected) in pairs {
        group.bench_function(name, |bench| {
            bench.iter(|| compat::check(black_box(&decode), black_box(&prefill)));
        });
        let kinds: Vec<_> = compat::check(&decode, &prefill).into_iter().map(|reason| reason.kind).collect();
        assert_eq!(kinds, expected, "{name}");
    }
}

fn whole_engines(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("tp 1024 onto tp 512, all ranks");
    let prefill = prefill(512, 1, 1);
    let ranks: Vec<_> = (0..1024).map(|rank| decode(1024, rank, KvKind::Mla)).collect();
    group.bench_function("map_ranks", |bench| {
        bench.iter(|| ranks.iter().for_each(|rank| drop(black_box(map_ranks(black_box(rank), &prefill)))));
    });
    for (rank, decode) in (0..).zip(&ranks) {
        let expected = mapping([(rank / 2, 1), (0, 1), (0, 1)], 2, 1);
        assert_eq!(map_ranks(decode, &prefill), Ok(expected), "decode rank {rank}");
    }
    let places: Vec<_> = (0..512).map(|tp| place(&prefill, tp)).collect();
    let any = decode(1024, 0, KvKind::Mla);
    group.bench_function("serve_ranks", |bench| {
        bench.iter(|| {
            places.iter().for_each(|place| drop(black_box(serve_ranks(&any, &prefill, black_box(*place)))));
        });
    });
    for (tp, place) in (0..).zip(&places) {
        let readers = DecodeRanks { tp_ranks: RankRange { first: 2 * tp, count: 2 }, pp_rank: 0 };
        assert_eq!(serve_ranks(&any, &prefill, *place), Ok(ServedRanks::Real(readers)), "prefill rank {tp}");
    }
}

/// Of (first, count) of the TP, CP and PP ranks, in this order.
fn mapping(ranks: [(u32, u32); 3], destinations: u32, answers: u32) -> RankMapping {
    let [tp, cp, pp] = ranks.map(|(first, count)| RankRange { first, count });
    RankMapping {
        target_tp_rank: Some(tp.first),
        target_tp_ranks: tp,
        target_cp_ranks: cp,
        target_pp_ranks: pp,
        required_dst_info_num: destinations,
        required_prefill_response_num: answers,
    }
}

fn decode(attn_tp_size: u32, engine_rank: u32, kv: KvKind) -> DecodeRank {
    let spec = DecodeRankSpec { attn_tp_size, engine_rank, kv, ..Default::default() };
    let Ok(decode) = DecodeRank::new(spec) else { unreachable!("the sizes here are within the limits") };
    decode
}

fn prefill(attn_tp_size: u32, attn_cp_size: u32, pp_size: u32) -> PrefillInfo {
    prefill_of(PrefillInfoSpec { attn_tp_size, attn_cp_size, pp_size, ..Default::default() })
}

fn prefill_of(spec: PrefillInfoSpec) -> PrefillInfo {
    let Ok(prefill) = PrefillInfo::new(spec) else { unreachable!("the sizes here are within the limits") };
    prefill
}

fn place(prefill: &PrefillInfo, tp: u32) -> PrefillRank {
    let Ok(place) = PrefillRank::new(prefill, tp, 0, 0) else { unreachable!("tp is below the size") };
    place
}
