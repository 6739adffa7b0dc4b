//! How many bytes a pending request costs, counted by the allocator: everything that the machine holds, its tables'
//! spare room and the peers included.
//!
//! One test, as the count is of the whole process.

use std::alloc::System;

use disagg_core::ids::{Room, Ticket};
use disagg_core::pending::{Added, Headers, Machine, Options};
use disagg_core::retry::RetryPolicy;
use disagg_core::time::Tick;
use disagg_core::topology::{DecodeRank, DecodeRankSpec};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

#[test]
fn pending_request_costs_at_most_160_bytes_in_every_stage() {
    let addrs: Vec<String> = (0..ADDRS).map(|number| format!("10.0.0.{number}:8998")).collect();
    let decode = DecodeRank::new(DecodeRankSpec::default()).unwrap();
    let before = live_bytes();
    let mut machine = Machine::new(decode, RetryPolicy::DEFAULT, Options::DEFAULT, Tick::ZERO);
    for (number, addr) in (0..PENDING).zip(addrs.iter().cycle()) {
        let room = Room::new(u64::try_from(number).unwrap()).unwrap();
        assert!(matches!(machine.add(Tick::ZERO, addr, room, None), Ok(Added::Pending(_))));
    }
    let commands = take_commands(&mut machine);
    assert_eq!(machine.stats(Tick::ZERO).need_info, PENDING);
    assert_bytes("waiting for the topology", before + bytes_of(&commands));

    answer(&mut machine, commands, |_| TOPOLOGY.to_vec());
    let commands = take_commands(&mut machine);
    assert_eq!(machine.stats(Tick::ZERO).need_dp_rank, PENDING);
    assert_bytes("waiting for the dp rank", before + bytes_of(&commands));

    answer(&mut machine, commands, all_ranks_1);
    let commands = take_commands(&mut machine);
    assert_eq!(machine.stats(Tick::ZERO).need_endpoints, PENDING);
    assert_bytes("waiting for the endpoints", before + bytes_of(&commands));

    answer(&mut machine, commands, |_| br#"{"rank_ip":"10.0.0.7","rank_port":41000}"#.to_vec());
    let commands = take_commands(&mut machine);
    answer(&mut machine, commands, |_| TOPOLOGY.to_vec());
    assert_eq!(machine.stats(Tick::ZERO).decided, PENDING);
    assert_bytes("decided", before);

    let mut ended = 0;
    while ended < PENDING {
        ended += machine.poll(Tick::ZERO, 4096).ended.len();
    }
    let left = live_bytes() - before;
    assert!(left < 4_096 * ADDRS, "{left} bytes are left, more than the peers need");
    drop(machine);
    // The output that the harness has captured so far counts too.
    assert!(live_bytes() < before + 4_096, "a machine that is gone keeps nothing");
}

/// The HTTP requests that the machine wants to make.
fn take_commands(machine: &mut Machine) -> Vec<(Ticket, Vec<u8>)> {
    std::iter::from_fn(|| machine.poll_command()).map(|it| (it.ticket, it.body.unwrap_or_default())).collect()
}

/// What the transport has taken is not the machine's any more.
fn bytes_of(commands: &Vec<(Ticket, Vec<u8>)>) -> usize {
    let bodies: usize = commands.iter().map(|(_, body)| body.capacity()).sum();
    bodies + commands.capacity() * size_of::<(Ticket, Vec<u8>)>()
}

fn answer(machine: &mut Machine, commands: Vec<(Ticket, Vec<u8>)>, with: impl Fn(&[u8]) -> Vec<u8>) {
    for (ticket, body) in commands {
        machine.on_response(Tick::ZERO, ticket, 200, &with(&body), Headers::default());
    }
}

/// Rank 1 for every room of a query.
fn all_ranks_1(query: &[u8]) -> Vec<u8> {
    let query = String::from_utf8_lossy(query);
    let rooms = query.trim_start_matches("{\"bootstrap_rooms\":[").trim_end_matches("]}");
    let entries: Vec<String> = rooms.split(',').map(|room| format!("\"{room}\":1")).collect();
    format!("{{{}}}", entries.join(",")).into_bytes()
}

fn assert_bytes(stage: &str, others: usize) {
    let each = (live_bytes() - others) / PENDING;
    println!("{stage}: {each} bytes a request");
    assert!(each <= 160, "{stage}: {each} bytes a request");
}

fn live_bytes() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

const TOPOLOGY: &[u8] = br#"{"attn_tp_size":1,"dp_size":2,"follow_bootstrap_room":false}"#;
const PENDING: usize = 100_000;
const ADDRS: usize = 256;
