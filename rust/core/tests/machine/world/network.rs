//! The network's side of a world: answers, time, commands.

use core::time::Duration;

use disagg_core::TransportError;
use disagg_core::ids::Ticket;
use disagg_core::pending::{CommandKind, Headers};
use disagg_core::time::Tick;

use super::{World, pick};
use crate::replies::{Question, Reply, class_of_error};
use crate::script::{Op, Timers};
use crate::setup::SPELLINGS;

fn headers(instance: Option<&'static str>) -> Headers<'static> {
    Headers { instance, ..Headers::default() }
}

impl World {
    pub fn answer(&mut self, op: &Op) {
        // The network takes commands before it gives answers, or it would not know what was cancelled.
        self.deaf = 0;
        self.listen();
        let tickets: Vec<Ticket> = self.oracle.flights.keys().copied().collect();
        match *op {
            Op::Answer { flight, reply, instance } => {
                if let Some(ticket) = pick(&tickets, flight) {
                    self.answer_one(ticket, reply, instance);
                }
            }
            Op::Fail { flight, error } => {
                if let Some(ticket) = pick(&tickets, flight) {
                    self.fail_one(ticket, error);
                }
            }
            Op::AnswerGone { ticket, reply } => self.answer_gone(ticket, reply),
            Op::FailGone { ticket } => {
                let ticket = pick(&self.oracle.spent, ticket).unwrap_or(Ticket(1 << 60));
                let now = self.now();
                self.machine.on_error(now, ticket, TransportError::Reset, "late");
            }
            Op::Work { rounds } => {
                for _ in 0..rounds {
                    self.answer_all(|_| Reply::Good);
                    self.wait(Duration::from_millis(20), Timers::Late);
                    self.poll(usize::MAX);
                }
            }
            Op::RanksAreNotFound { rounds } => {
                for _ in 0..rounds {
                    self.answer_all(|kind| match kind {
                        CommandKind::Endpoint => Reply::Status(404),
                        _ => Reply::Good,
                    });
                }
            }
            ref other => unreachable!("{other:?} answers nothing"),
        }
    }

    fn answer_one(&mut self, ticket: Ticket, reply: Reply, instance: Option<&'static str>) {
        let flight = self.oracle.land(ticket);
        let peer = SPELLINGS.iter().position(|spellings| spellings[0] == flight.addr).unwrap();
        let known = if reply == Reply::Good { self.oracle.known_port(&flight) } else { None };
        let question = Question {
            kind: if flight.is_check() { CommandKind::Endpoint } else { flight.kind },
            rooms: &flight.rooms,
            topology: self.topologies[peer],
            port: known.unwrap_or_else(|| self.new_port()),
        };
        let answer = reply.answer(&question);
        let before = self.stats().decided;
        let now = self.now();
        self.machine.on_response(now, ticket, answer.status, answer.body.as_bytes(), headers(instance));
        let decided = self.stats().decided - before;
        self.oracle.on_answer(&flight, &answer, instance, decided);
    }

    pub fn fail_one(&mut self, ticket: Ticket, error: TransportError) {
        let flight = self.oracle.land(ticket);
        let before = self.stats().decided;
        let now = self.now();
        self.machine.on_error(now, ticket, error, "it broke");
        let decided = self.stats().decided - before;
        self.oracle.on_error(&flight, class_of_error(error), decided);
    }

    fn answer_all(&mut self, reply: impl Fn(CommandKind) -> Reply) {
        let flights: Vec<_> = self.oracle.flights.values().map(|it| (it.ticket, it.kind)).collect();
        for (ticket, kind) in flights {
            if self.oracle.flights.contains_key(&ticket) {
                self.answer_one(ticket, reply(kind), None);
            }
            self.settle();
        }
    }

    /// What is not awaited changes nothing.
    fn answer_gone(&mut self, ticket: usize, reply: Reply) {
        let ticket = pick(&self.oracle.spent, ticket).unwrap_or(Ticket(1 << 60));
        let question =
            Question { kind: CommandKind::Endpoint, rooms: &[1, 2], topology: 0, port: self.new_port() };
        let (answer, before) = (reply.answer(&question), self.stats());
        let now = self.now();
        self.machine.on_response(now, ticket, answer.status, answer.body.as_bytes(), headers(Some("c")));
        assert_eq!(self.stats(), before, "{ticket:?} is not awaited");
    }

    pub fn pass_time(&mut self, op: &Op) {
        self.deaf = 0;
        self.listen();
        match *op {
            Op::Wait { millis, timers } => self.wait(Duration::from_millis(millis), timers),
            Op::Live { millis } => {
                let slice = Duration::from_millis(250);
                let mut left = Duration::from_millis(millis);
                while !left.is_zero() {
                    self.wait(left.min(slice), Timers::Punctual);
                    left = left.saturating_sub(slice);
                    self.poll(usize::MAX);
                    self.listen();
                }
            }
            // How far the machine has come depends on whether it was told, and thus on how often timers are called.
            Op::Back { .. } if self.mode.punctual => {}
            Op::Back { millis } => {
                let back = self.clock.as_nanos().saturating_sub(millis * 1_000_000);
                self.clock = Tick::from_nanos(back);
            }
            ref other => unreachable!("{other:?} takes no time"),
        }
    }

    pub fn wait(&mut self, by: Duration, timers: Timers) {
        self.listen();
        let until = self.clock.after(by);
        let punctual = self.mode.punctual || timers == Timers::Punctual;
        if punctual {
            let grid = (by / 100).max(Duration::from_millis(10));
            while let Some(next) = self.next_call(grid).filter(|&next| next <= until) {
                self.clock = next;
                self.call_timers();
            }
        }
        self.clock = until;
        if timers == Timers::Late && !punctual {
            self.call_timers();
        }
    }

    /// When punctual timers are called next.
    fn next_call(&self, grid: Duration) -> Option<Tick> {
        let announced = self.announced.map(|at| at.max(self.clock));
        let between = self.mode.restless.then(|| self.clock.after(grid));
        announced.into_iter().chain(between).min()
    }

    pub fn wait_until(&mut self, until: Tick) {
        self.wait(until.since(self.clock), Timers::Late);
    }

    /// Call the timers, again if they announce the same instant: a peer may take two steps in it, not more.
    fn call_timers(&mut self) {
        for _ in 0..2 {
            let now = self.now();
            let due = self.announced.is_some_and(|at| at <= self.oracle.now());
            self.machine.on_timer(now);
            self.oracle.after_timers(&self.stats());
            let before = self.oracle.flights.len();
            self.listen();
            assert!(due || before == self.oracle.flights.len(), "nothing was due, and something happened");
            if self.announced.is_none_or(|next| next > self.oracle.now()) {
                return;
            }
        }
        panic!("{:?} is due and not done", self.announced);
    }

    /// The network takes commands and asks for the next timer; it must have been woken for that.
    pub fn listen(&mut self) {
        let rung = self.machine.take_bell();
        assert!(!self.machine.take_bell(), "the bell rings once for each occasion");
        let mut commands = 0;
        while let Some(command) = self.machine.poll_command() {
            if self.mode.traced {
                self.trace.push(format!("{:?} {command:?}", self.oracle.now()));
            }
            self.oracle.on_command(&command);
            commands += 1;
        }
        let next = self.machine.poll_timer();
        let earlier = next.is_some_and(|next| self.announced.is_none_or(|announced| next < announced));
        assert!(rung || !(earlier || commands > 0), "nobody was woken: {commands} commands, {next:?}");
        self.announced = next;
        self.oracle.after_commands();
        self.oracle.on_retired(self.machine.poll_retired());
    }

    fn new_port(&mut self) -> u16 {
        self.next_port += 1;
        self.next_port
    }
}
