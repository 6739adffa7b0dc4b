use super::*;

#[test]
fn sizes_outside_the_range_are_refused_with_their_name() {
    for size in [0, MAX_SIZE + 1] {
        let spec = PrefillInfoSpec { dp_size: size, ..Default::default() };
        assert_eq!(
            PrefillInfo::new(spec),
            Err(InvalidValue::OutOfRange { field: "dp_size", value: u64::from(size), min: 1, max: 65_535 })
        );
    }
}

#[test]
fn the_product_of_the_sizes_is_bounded_without_overflow() {
    let spec = PrefillInfoSpec {
        attn_tp_size: 65_535,
        attn_cp_size: 65_535,
        dp_size: 65_535,
        pp_size: 65_535,
        ..Default::default()
    };
    assert!(matches!(PrefillInfo::new(spec), Err(InvalidValue::TooManyRanks { .. })));
    let spec = PrefillInfoSpec { attn_tp_size: 256, dp_size: 256, ..Default::default() };
    assert!(PrefillInfo::new(spec).is_ok());
}

#[test]
fn ranks_must_lie_in_their_groups_but_the_engine_rank_wraps() {
    let spec = DecodeRankSpec { pp_size: 2, pp_rank: 2, ..Default::default() };
    assert!(matches!(DecodeRank::new(spec), Err(InvalidValue::RankNotBelowSize { field: "pp_rank", .. })));
    let spec = DecodeRankSpec { attn_tp_size: 4, engine_rank: 7, ..Default::default() };
    assert_eq!(DecodeRank::new(spec).unwrap().attn_tp_rank(), 3);
}
