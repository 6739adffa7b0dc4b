//! The room table.

use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use super::*;

fn insert(rooms: &mut Rooms, seconds: f64, room: u64, dp_rank: u16) {
    rooms.insert(at_s(seconds), &RoomPut { room, dp_rank });
}

#[test]
fn a04_11_an_entry_expires_by_itself() {
    let mut rooms = Rooms::new(at_s(2.0), 10);
    insert(&mut rooms, 0.0, 1, 3);
    assert_eq!(rooms.dp_rank(at_s(1.0), 1), Some(3));
    assert_eq!(rooms.dp_rank(at_s(1.999), 1), Some(3));
    assert_eq!(rooms.dp_rank(at_s(2.0), 1), None);
    assert_eq!(rooms.len(), 1, "not swept yet");
    rooms.expire(at_s(5.0), 10);
    assert!(rooms.is_empty());
    assert_eq!(rooms.evictions(), 0, "it had its time");
}

#[test]
fn registering_again_overwrites_and_starts_its_time_afresh() {
    let mut rooms = Rooms::new(at_s(10.0), 10);
    insert(&mut rooms, 0.0, 1, 3);
    insert(&mut rooms, 5.0, 1, 4);
    assert_eq!(rooms.dp_rank(at_s(14.0), 1), Some(4));
    assert_eq!(rooms.dp_rank(at_s(15.0), 1), None);
}

#[test]
fn the_oldest_is_evicted_first_and_counted() {
    let mut rooms = Rooms::new(at_s(10.0), 3);
    for room in 0..3 {
        insert(&mut rooms, 0.0, room, 0);
    }
    insert(&mut rooms, 1.0, 0, 9); // 1 is the oldest now
    insert(&mut rooms, 1.0, 7, 0);
    let known: Vec<u64> = (0..8).filter(|&room| rooms.dp_rank(at_s(1.0), room).is_some()).collect();
    assert_eq!(known, [0, 2, 7]);
    assert_eq!((rooms.len(), rooms.evictions()), (3, 1));
}

#[test]
fn one_room_registered_for_ever_takes_no_memory() {
    let mut rooms = Rooms::new(at_s(1e6), 10);
    for _ in 0..10_000 {
        insert(&mut rooms, 0.0, 1, 1);
        insert(&mut rooms, 0.0, 2, 2);
    }
    assert!(rooms.places() < 1100, "{}", rooms.places());
    assert_eq!(rooms.dp_rank(at_s(0.0), 2), Some(2));
}

#[test]
fn memory_of_a_burst_goes_back() {
    let mut rooms = Rooms::new(at_s(1.0), 100_000);
    for room in 0..50_000 {
        insert(&mut rooms, 0.0, room, 1);
    }
    rooms.expire(at_s(1.0), 100_000);
    assert_eq!(rooms.places(), 0);
    assert!(rooms.capacity() < 1024, "{}", rooms.capacity());
}

#[test]
fn a04_12_rooms_have_one_canonical_form() {
    let put =
        |text: &str| RoomPut::from_json(format!("{{\"bootstrap_room\": {text}, \"dp_rank\": 3}}").as_bytes());
    assert_eq!(put("\"0042\"").unwrap().room, 42);
    assert_eq!(put("9223372036854775807").unwrap().room, (1 << 63) - 1);
    assert_eq!(put("0").unwrap().room, 0);
    for bad in [
        "9223372036854775808",
        "-1",
        "1.9",
        "1e2",
        "true",
        "\" 43 \"",
        "\"4_5\"",
        "\"\"",
        "null",
        "{}",
        "1e300",
    ] {
        assert_eq!(put(bad).unwrap_err().field(), Some("bootstrap_room"), "{bad}");
    }
    let mut registry = registry();
    registry.on_room(at_s(0.0), &put("\"0042\"").unwrap());
    let query = RoomQuery::from_json(b"{\"bootstrap_rooms\": [\"042\", 42, 7]}").unwrap();
    let answer = registry.dp_ranks(at_s(0.0), &query);
    assert_eq!(serde_json::to_string(&answer).unwrap(), "{\"42\":3}");
}

#[test]
fn dp_ranks_are_bounded() {
    let put =
        |text: &str| RoomPut::from_json(format!("{{\"bootstrap_room\": 1, \"dp_rank\": {text}}}").as_bytes());
    assert_eq!(put("65535").unwrap().dp_rank, 65_535);
    assert_eq!(put("\"3\"").unwrap().dp_rank, 3);
    for bad in ["65536", "-1", "2.7", "true", "null", "[1]"] {
        assert_eq!(put(bad).unwrap_err().field(), Some("dp_rank"), "{bad}");
    }
}

#[test]
fn one_bad_room_refuses_the_whole_query() {
    let query = |text: &str| RoomQuery::from_json(format!("{{\"bootstrap_rooms\": {text}}}").as_bytes());
    assert_eq!(query("[1, \"02\"]").unwrap().rooms, vec![1, 2]);
    assert!(query("[]").unwrap().rooms.is_empty());
    for bad in ["[1, -1]", "[null]", "[[1]]", "\"12x\"", "5", "{}", "null", "[1.0]"] {
        assert_eq!(query(bad).unwrap_err().field(), Some("bootstrap_rooms"), "{bad}");
    }
    let many = |count: usize| format!("[{}1]", "1,".repeat(count - 1));
    assert_eq!(query(&many(10_000)).unwrap().rooms.len(), 10_000);
    let why = query(&many(10_001)).unwrap_err();
    assert_eq!(why, BadInput::TooManyRooms { count: 10_001 });
    assert_eq!(why.to_string(), "10001 rooms in one query: at most 10000 are answered");
}

#[test]
fn options_that_hold_nothing_are_refused() {
    let no_ttl = Options { room_ttl: Duration::ZERO, ..Options::DEFAULT };
    assert_eq!(no_ttl.checked().unwrap_err().to_string(), "room ttl is 0: must be above 0");
    let no_room = Options { room_cap: 0, ..Options::DEFAULT };
    assert_eq!(no_room.checked().unwrap_err().to_string(), "room cap is 0: must be at least 1");
}
