//! Answers of peers: what they say, and what the tables of DESIGN.md section 6 make of them.

use disagg_core::TransportError;
use disagg_core::failure::FailureKind;
use disagg_core::pending::CommandKind;

use crate::setup::TOPOLOGIES;

/// How a peer answers, as the script says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// What the peer has to say to this question.
    Good,
    /// This topology, whatever was asked.
    Topology(usize),
    /// An endpoint, whatever was asked.
    Endpoint,
    /// This dp rank for all rooms that were asked for, or for every second one.
    Ranks {
        rank: u32,
        all: bool,
    },
    /// Ranks that are none.
    MalformedRanks,
    Status(u16),
    BadBody(usize),
}

/// An answer on its way.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub body: String,
    pub says: Says,
}

/// What a body says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Says {
    Topology(usize),
    /// The port is in no other answer.
    Endpoint(u16),
    Ranks(Vec<(u64, u32)>),
    NullSizes,
    /// Nothing that could be used; but it may be a JSON object.
    Nothing,
}

/// What is in flight, as far as an answer depends on it.
pub struct Question<'a> {
    pub kind: CommandKind,
    pub rooms: &'a [u64],
    /// What the peer is now.
    pub topology: usize,
    /// A port that was not used yet.
    pub port: u16,
}

/// What an answer to the topology query means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Good(usize),
    AskOlderForm,
    Permanent,
    Transient(FailureKind),
}

impl Reply {
    pub fn answer(self, question: &Question<'_>) -> Answer {
        let topology = |number: usize| Answer::good(TOPOLOGIES[number].body, Says::Topology(number));
        let all_ranks = |rank: &dyn Fn(u64) -> u32| {
            Answer::ranks(question.rooms.iter().map(|&room| (room, rank(room))).collect())
        };
        match self {
            Self::Good => match question.kind {
                CommandKind::Topology | CommandKind::Heartbeat => topology(question.topology),
                CommandKind::Endpoint => Answer::endpoint(question.port),
                CommandKind::DpRanks => {
                    let size = u64::from(TOPOLOGIES[question.topology].dp_size);
                    all_ranks(&|room| u32::try_from((room + 1) % size).unwrap())
                }
                CommandKind::Cancel => unreachable!("a cancellation is not in flight"),
            },
            Self::Topology(number) => topology(number),
            Self::Endpoint => Answer::endpoint(question.port),
            Self::Ranks { rank, all: true } => all_ranks(&|_| rank),
            Self::Ranks { rank, all: false } => {
                Answer::ranks(question.rooms.iter().step_by(2).map(|&room| (room, rank)).collect())
            }
            Self::MalformedRanks => {
                let entries: Vec<String> =
                    question.rooms.iter().map(|room| format!("\"{room}\":-1,\"0{room}\":0")).collect();
                Answer::good(&format!("{{{}}}", entries.join(",")), Says::Nothing)
            }
            Self::Status(status) => Answer { status, body: "not what you want".into(), says: Says::Nothing },
            Self::BadBody(number) => {
                let (body, says) = BAD_BODIES[number].clone();
                Answer::good(body, says)
            }
        }
    }
}

impl Answer {
    fn good(body: &str, says: Says) -> Self {
        Self { status: 200, body: body.into(), says }
    }

    fn endpoint(port: u16) -> Self {
        Self::good(&format!(r#"{{"rank_ip":"10.9.9.9","rank_port":{port}}}"#), Says::Endpoint(port))
    }

    fn ranks(ranks: Vec<(u64, u32)>) -> Self {
        let entries: Vec<String> = ranks.iter().map(|(room, rank)| format!("\"{room}\":{rank}")).collect();
        Self::good(&format!("{{{}}}", entries.join(",")), Says::Ranks(ranks))
    }

    /// What it means as an answer to the topology query in its newer or older form.
    pub fn class(&self, older_form: bool, not_found_is_transient: bool) -> Class {
        match (self.status, &self.says) {
            (200, &Says::Topology(number)) => Class::Good(number),
            (200, Says::NullSizes) | (503, _) => Class::Transient(FailureKind::NotReady),
            (200 | 204 | 413, _) => Class::Transient(FailureKind::ProtocolError),
            (404, _) if not_found_is_transient => Class::Transient(FailureKind::NotReady),
            (400, _) if !older_form => Class::AskOlderForm,
            (302 | 400 | 401 | 403 | 404 | 405 | 415 | 422, _) => Class::Permanent,
            (429 | 500 | 502, _) => Class::Transient(FailureKind::Unreachable),
            (status, _) => unreachable!("the script has no status {status}"),
        }
    }
}

/// What a transport error means as the end of an attempt.
pub fn class_of_error(error: TransportError) -> Class {
    Class::Transient(match error {
        TransportError::Cut | TransportError::Oversized | TransportError::Encoding => {
            FailureKind::ProtocolError
        }
        TransportError::Refused
        | TransportError::Timeout
        | TransportError::Reset
        | TransportError::Dns
        | TransportError::Other => FailureKind::Unreachable,
        TransportError::Forbidden => unreachable!("the script resolves no names"),
    })
}

pub const STATUSES: [u16; 15] = [204, 302, 400, 400, 401, 403, 404, 404, 405, 413, 415, 429, 500, 502, 503];
pub const BAD_BODIES: [(&str, Says); 7] = [
    ("", Says::Nothing),
    ("{}", Says::Nothing),
    ("[]", Says::Nothing),
    ("not json", Says::Nothing),
    (r#"{"attn_tp_size":0,"dp_size":1}"#, Says::Nothing),
    (r#"{"attn_tp_size":"8.0","dp_size":1}"#, Says::Nothing),
    (r#"{"attn_tp_size":1,"dp_size":null}"#, Says::NullSizes),
];
