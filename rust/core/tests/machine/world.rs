//! A machine with a scheduler, a network and a clock around it, all of which do what the script says.

mod network;

use disagg_core::failure::FailureKind;
use disagg_core::ids::{RequestId, Room};
use disagg_core::pending::{Added, Machine, Stats};
use disagg_core::time::Tick;

use crate::oracle::Oracle;
use crate::script::Op;
use crate::setup::{PEERS, SPELLINGS, Setup};

/// How the same script is run in another way.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mode {
    /// Note all that comes out.
    pub traced: bool,
    /// A clock that went back is told as one that stands still.
    pub never_back: bool,
    /// Timers are always called when they were announced.
    pub punctual: bool,
    /// Timers are called every 10 ms besides.
    pub restless: bool,
}

/// All there is in one run.
pub struct World {
    machine: Machine,
    pub oracle: Oracle,
    pub trace: Vec<String>,
    mode: Mode,
    topologies: [usize; PEERS],
    /// What the driver's clock shows; it may go back.
    clock: Tick,
    announced: Option<Tick>,
    /// For how many events more nobody takes commands.
    deaf: u8,
    next_port: u16,
    next_room: u64,
}

impl World {
    pub fn new(setup: &Setup, mode: Mode) -> Self {
        Self {
            machine: setup.machine(),
            oracle: Oracle::new(setup),
            trace: Vec::new(),
            mode,
            topologies: setup.topologies,
            clock: Tick::ZERO,
            announced: None,
            deaf: 0,
            next_port: 1,
            next_room: 1000,
        }
    }

    pub fn run(setup: &Setup, script: &[Op], mode: Mode) -> Self {
        let mut world = Self::new(setup, mode);
        for op in script {
            world.apply(op);
        }
        world
    }

    pub fn apply(&mut self, op: &Op) {
        self.deaf = self.deaf.saturating_sub(1);
        match *op {
            Op::Add { peer, spelling, room, preset } => self.add(peer, spelling, room, preset),
            Op::AddMany { peer, count } => self.add_many(peer, count),
            Op::AddElsewhere { text, room } => self.add_elsewhere(text, room),
            Op::Discard(at) => self.discard(at),
            Op::DiscardGone(at) => self.discard_gone(at),
            Op::DiscardAll => self.discard_all(),
            Op::Poll { limit } => self.poll(limit),
            Op::Pause => self.pause(),
            Op::Resume => self.resume(),
            Op::FailAll(kind) => self.fail_all(kind),
            Op::PeerChanges { peer, topology } => self.topologies[peer] = topology,
            Op::Deaf { events } => {
                self.listen();
                self.deaf = events;
                self.oracle.on_deaf();
            }
            Op::FailRoom { .. } | Op::Release { .. } | Op::Lost { .. } | Op::Restarted { .. } => {
                self.tell(op);
            }
            Op::Wait { .. } | Op::Live { .. } | Op::Back { .. } => self.pass_time(op),
            _ => self.answer(op),
        }
        self.settle();
    }

    fn tell(&mut self, op: &Op) {
        if let Op::Release { room } = *op {
            self.machine.release(room_of(room));
            return self.oracle.on_release(room);
        }
        let now = self.now();
        match *op {
            Op::FailRoom { room, status } => {
                let reason = "input too long";
                let met = self.machine.fail_room(now, room_of(room), reason, status);
                self.oracle.on_fail_room(room, reason, status, met);
            }
            Op::Lost { peer, spelling } => {
                let known = self.machine.peer_lost(now, spell(peer, spelling), None).unwrap();
                self.oracle.on_peer_lost(SPELLINGS[peer][0], known);
            }
            Op::Restarted { peer, spelling } => {
                let known = self.machine.peer_restarted(now, spell(peer, spelling), None).unwrap();
                self.oracle.on_peer_restarted(SPELLINGS[peer][0], known);
            }
            ref other => unreachable!("{other:?} tells nothing"),
        }
    }

    /// The time that the machine is told now. It knows no other, so call this only for what is told.
    fn now(&mut self) -> Tick {
        self.oracle.pass(self.clock);
        if self.mode.never_back { self.oracle.now() } else { self.clock }
    }

    fn add(&mut self, peer: usize, spelling: usize, room: u64, preset: Option<u32>) {
        let (now, addr) = (self.now(), SPELLINGS[peer][0]);
        let before = self.stats();
        let text = spell(peer, spelling);
        let pending = match self.machine.add(now, text, room_of(room), preset).unwrap() {
            Added::Pending(id) => Ok(id),
            Added::Routed(route) => Err(route.clone()),
            Added::Fake(route) => panic!("{text} is no warm-up address: {route:?}"),
        };
        let request = (addr, room, preset);
        match pending {
            Ok(id) => self.oracle.on_pending(id, request, &before, &self.stats()),
            Err(route) => self.oracle.on_routed_at_once(&self.machine, &route, request),
        }
    }

    /// Warm-up transfers and malformed addresses touch nothing.
    fn add_elsewhere(&mut self, text: &str, room: u64) {
        let (now, before) = (self.now(), self.stats());
        match self.machine.add(now, text, room_of(room), None) {
            Ok(Added::Fake(route)) => {
                assert!(text.starts_with("2.2.2.2") && route.fake && route.endpoints.is_empty());
            }
            Ok(other) => panic!("{text}: {other:?}"),
            Err(_) => assert!(!text.starts_with("2.2.2.2"), "{text} is an address"),
        }
        assert_eq!(self.stats(), before);
    }

    fn add_many(&mut self, peer: usize, count: u64) {
        for _ in 0..count {
            self.next_room += 1;
            self.add(peer, 0, self.next_room, None);
        }
    }

    fn discard(&mut self, at: usize) {
        let ids: Vec<RequestId> = self.oracle.held.iter().map(|request| request.id).collect();
        if let Some(id) = pick(&ids, at) {
            let now = self.now();
            self.machine.discard(now, id);
            self.oracle.on_discard(id);
        }
    }

    fn discard_gone(&mut self, at: usize) {
        if let Some(id) = pick(&self.oracle.gone, at) {
            let now = self.now();
            self.machine.discard(now, id);
        }
    }

    fn discard_all(&mut self) {
        let now = self.now();
        self.machine.discard_all(now);
        self.oracle.on_discard_all();
    }

    pub fn poll(&mut self, limit: usize) {
        let now = self.now();
        let step = self.machine.poll(now, limit);
        if self.mode.traced && step.seq > 0 {
            self.trace.push(format!("{:?} {step:?}", self.oracle.now()));
        }
        self.oracle.on_poll(limit, &step, &self.stats());
        if self.deaf == 0 {
            self.listen();
            if !step.more {
                self.oracle.something_is_under_way(self.announced);
            }
        }
    }

    fn pause(&mut self) {
        let now = self.now();
        self.machine.pause(now);
        self.oracle.on_pause();
    }

    pub fn resume(&mut self) {
        let now = self.now();
        self.machine.resume(now);
        self.oracle.on_resume();
    }

    pub fn fail_all(&mut self, kind: FailureKind) {
        let now = self.now();
        self.machine.fail_all(now, kind, "the end");
        self.oracle.on_fail_all(kind, "the end");
    }

    pub fn release_all(&mut self) {
        for room in self.oracle.release_all() {
            self.machine.release(room_of(room));
        }
    }

    pub fn check_nothing_is_left(&self) {
        self.oracle.check_nothing_is_left(&self.stats());
    }

    /// An event is over.
    fn settle(&mut self) {
        if self.deaf == 0 {
            self.listen();
        }
        self.oracle.check_counts(&self.stats(), self.deaf == 0);
        for request in &self.oracle.held {
            assert!(self.machine.explain(self.clock, request.id).is_some(), "{request:?}");
        }
    }

    fn stats(&self) -> Stats {
        self.machine.stats(self.clock)
    }
}

fn pick<T: Copy>(from: &[T], at: usize) -> Option<T> {
    from.get(at.checked_rem(from.len())?).copied()
}

fn room_of(room: u64) -> Room {
    Room::new(room).unwrap()
}

fn spell(peer: usize, spelling: usize) -> &'static str {
    SPELLINGS[peer][spelling % SPELLINGS[peer].len()]
}
