//! Laws that hold whatever comes in, and the room table against an obvious one.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum RoomStep {
    Insert { room: u64, dp_rank: u16 },
    Wait { ms: u64 },
    Sweep,
}

fn room_step() -> impl Strategy<Value = RoomStep> {
    prop_oneof![
        5 => (0..12_u64, any::<u16>()).prop_map(|(room, dp_rank)| RoomStep::Insert { room, dp_rank }),
        2 => (0..400_u64).prop_map(|ms| RoomStep::Wait { ms }),
        1 => Just(RoomStep::Sweep),
    ]
}

/// Rooms in the order of their registration, oldest first.
struct ObviousRooms(Vec<(u64, u16, u64)>);

proptest! {
    #[test]
    fn rooms_do_what_the_obvious_table_does(steps in proptest::collection::vec(room_step(), 1..200)) {
        const TTL_MS: u64 = 1000;
        const CAP: usize = 6;
        let (mut rooms, mut model, mut now_ms) = (Rooms::new(Duration::from_millis(TTL_MS), CAP), ObviousRooms(Vec::new()), 0);
        for step in steps {
            let now = Duration::from_millis(now_ms);
            match step {
                RoomStep::Insert { room, dp_rank } => {
                    rooms.insert(now, &RoomPut { room, dp_rank });
                    model.0.retain(|&(other, _, until)| other != room && now_ms < until);
                    model.0.push((room, dp_rank, now_ms + TTL_MS));
                    if model.0.len() > CAP {
                        model.0.remove(0);
                    }
                }
                RoomStep::Wait { ms } => now_ms += ms,
                RoomStep::Sweep => rooms.expire(now, usize::MAX),
            }
            let now = Duration::from_millis(now_ms);
            let expected: BTreeMap<u64, u16> = model.0.iter()
                .filter(|&&(_, _, until)| now_ms < until)
                .map(|&(room, dp_rank, _)| (room, dp_rank))
                .collect();
            let found: BTreeMap<u64, u16> = (0..12).filter_map(|room| Some((room, rooms.dp_rank(now, room)?))).collect();
            prop_assert_eq!(found, expected);
            prop_assert!(rooms.len() <= CAP);
        }
    }

    /// Whatever ranks of two layouts come in whatever order: what is served is one whole engine, an answer never
    /// mixes two layouts, the epoch tells every change, and a refusal changes nothing.
    #[test]
    fn what_is_served_is_whole_and_every_change_has_an_epoch(
        puts in proptest::collection::vec((0..2_usize, 0..4_u16, 0..3_u16, 0..3000_u64), 1..60),
    ) {
        let (mut registry, mut now_ms) = (registry(), 0);
        let (mut epoch_before, mut served_before) = (0, None);
        for (layout, rank_number, life, pause_ms) in puts {
            now_ms += pause_ms;
            let now = Duration::from_millis(now_ms);
            let tp = [2, 4][layout];
            let sent = with(body(tp, rank_number % tp), "rank_port", json!(1000 * (life + 1) + rank_number));
            registry.on_timer(now);
            let before = registry.table.clone();
            if registry.on_register(now, rank(&sent)).is_err() {
                prop_assert_eq!(&registry.table, &before);
            }
            let stamp = registry.stamp(now);
            let served = registry.table.serving().map(|serving| {
                (serving.layout.clone(), serving.rows().map(|(at, endpoint)| (at, endpoint.clone())).collect::<Vec<_>>())
            });
            if let Some((layout, rows)) = &served {
                prop_assert_eq!(rows.len(), layout.sizes.ranks());
            } else {
                prop_assert!(!registry.is_ready(now));
            }
            prop_assert_eq!(served == served_before, stamp.epoch == epoch_before);
            prop_assert!(stamp.epoch >= epoch_before);
            (epoch_before, served_before) = (stamp.epoch, served);
        }
    }

    #[test]
    fn no_bytes_make_a_parser_panic(body in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = (Put::from_json(&body), RoomPut::from_json(&body), RoomQuery::from_json(&body));
    }
}
