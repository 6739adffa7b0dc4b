//! Nanoseconds of the mapping and the check, without Python. `cargo bench -p disagg-core`; `cargo test` runs each once.

#![allow(missing_docs, reason = "criterion_group! makes public functions")]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a bench is a test")]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use disagg_core::compat;
use disagg_core::rank_mapping::{PrefillRank, map_ranks, serve_ranks};
use disagg_core::topology::{DecodeRank, DecodeRankSpec, KvKind, PrefillInfo, PrefillInfoSpec};

fn decode(attn_tp_size: u32, engine_rank: u32, kv: KvKind) -> DecodeRank {
    DecodeRank::new(DecodeRankSpec { attn_tp_size, engine_rank, kv, ..Default::default() }).unwrap()
}

fn prefill(attn_tp_size: u32, attn_cp_size: u32, pp_size: u32) -> PrefillInfo {
    PrefillInfo::new(PrefillInfoSpec { attn_tp_size, attn_cp_size, pp_size, ..Default::default() }).unwrap()
}

fn map_one(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("map_ranks");
    for (name, decode, prefill, contacts) in [
        ("tp 8 onto tp 8", decode(8, 5, KvKind::Mha), prefill(8, 1, 1), 1),
        ("tp 4 onto tp 16, mla", decode(4, 1, KvKind::Mla), prefill(16, 1, 1), 4),
        ("tp 1 onto tp 32 cp 8 pp 8, hybrid_mla", decode(1, 0, KvKind::HybridMla), prefill(32, 8, 8), 2048),
    ] {
        group.bench_function(name, |bench| {
            bench.iter(|| map_ranks(black_box(&decode), black_box(&prefill)).unwrap());
        });
        assert_eq!(map_ranks(&decode, &prefill).unwrap().contact_count(), contacts);
    }
}

fn check_one(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("compat::check");
    let (equal, other) = (decode(8, 5, KvKind::Mla), prefill(8, 1, 1));
    group.bench_function("no difference", |bench| {
        bench.iter(|| compat::check(black_box(&equal), black_box(&other)));
    });
    assert!(compat::check(&equal, &other).is_empty());
    let odd = PrefillInfo::new(PrefillInfoSpec {
        attn_tp_size: 3,
        page_size: Some(32),
        kv_cache_dtype: Some("fp8_e4m3".to_string()),
        ..Default::default()
    })
    .unwrap();
    group.bench_function("three differences", |bench| {
        bench.iter(|| compat::check(black_box(&equal), black_box(&odd)));
    });
    assert_eq!(compat::check(&equal, &odd).len(), 3);
}

fn whole_engines(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("tp 1024 onto tp 512, all ranks");
    let ranks: Vec<_> = (0..1024).map(|rank| decode(1024, rank, KvKind::Mla)).collect();
    let engine = prefill(512, 1, 1);
    let map_all =
        || -> u32 { ranks.iter().map(|rank| map_ranks(rank, &engine).unwrap().contact_count()).sum() };
    group.bench_function("map_ranks", |bench| bench.iter(|| black_box(map_all())));
    assert_eq!(map_all(), 1024);
    let places: Vec<_> = (0..512).map(|tp| PrefillRank::new(&engine, tp, 0, 0).unwrap()).collect();
    let serve_all = || -> u32 {
        let served = places.iter().map(|place| serve_ranks(&ranks[0], &engine, *place).unwrap());
        served.map(|served| served.required_dst_info_num()).sum()
    };
    group.bench_function("serve_ranks", |bench| bench.iter(|| black_box(serve_all())));
    assert_eq!(serve_all(), 1024);
}

criterion_group!(benches, map_one, check_one, whole_engines);
criterion_main!(benches);
