//! The query of `GET /route`, of either dialect.

use alloc::format;
use alloc::string::String;

use super::fields::{is_digits, saturating, shown};
use super::layout::Coordinate;
use super::refusal::BadInput;

/// Which names a client uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// Eras E3 and later.
    Current,
    /// Era E2: three values, prefixed names in the answer, no CP.
    SecondEra,
}

/// What a `GET /route` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteQuery {
    /// All values are -1.
    Topology(Dialect),
    /// One rank; `None` is one that no engine can have, such as -1 beside 0.
    Rank(Option<Coordinate>),
}

impl RouteQuery {
    /// Reads decoded query pairs; of a repeated name the first counts, other names are ignored.
    ///
    /// # Errors
    /// [`BadInput`] when a value is absent, empty or not an integer.
    pub fn from_pairs<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)> + Clone) -> Result<Self, BadInput> {
        let first = |name: &str| {
            let mut found = pairs.clone().filter(|(key, _)| *key == name);
            found.next().map(|(_, value)| value)
        };
        let has = |name: &str| first(name).is_some();
        let read = |field: &'static str| value(field, first(field));
        let [group, context, rank, stage] = CURRENT;
        let [old_rank, old_group] = SECOND_ERA;
        // Both eras name the stage alike, so it does not tell them apart.
        if (has(old_rank) || has(old_group)) && !(has(group) || has(context) || has(rank)) {
            let (tp, dp, pp) = (read(old_rank)?, read(old_group)?, read(stage)?);
            return Ok(Self::new(Dialect::SecondEra, &[dp, tp, pp], || {
                coordinate(dp, Value::Number(0), tp, pp)
            }));
        }
        let (dp, cp, tp, pp) = (read(group)?, read(context)?, read(rank)?, read(stage)?);
        Ok(Self::new(Dialect::Current, &[dp, cp, tp, pp], || coordinate(dp, cp, tp, pp)))
    }

    fn new(dialect: Dialect, values: &[Value], rank: impl FnOnce() -> Option<Coordinate>) -> Self {
        if values.iter().all(|value| *value == Value::MinusOne) {
            Self::Topology(dialect)
        } else {
            Self::Rank(rank())
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Value {
    MinusOne,
    Number(u64),
}

fn value(field: &'static str, text: Option<&str>) -> Result<Value, BadInput> {
    match text {
        None | Some("") => Err(BadInput::Missing { field }),
        Some("-1") => Ok(Value::MinusOne),
        Some(digits) if is_digits(digits) => Ok(Value::Number(saturating(digits))),
        Some(other) => {
            Err(BadInput::Value { field, value: quoted(other), rule: "must be ASCII digits, or -1" })
        }
    }
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", shown(text).escape_debug())
}

fn coordinate(dp: Value, cp: Value, tp: Value, pp: Value) -> Option<Coordinate> {
    let narrow = |value| match value {
        Value::MinusOne => None,
        Value::Number(number) => u16::try_from(number).ok(),
    };
    Some(Coordinate { dp: narrow(dp)?, cp: narrow(cp)?, tp: narrow(tp)?, pp: narrow(pp)? })
}

const CURRENT: [&str; 4] = ["prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"];

const SECOND_ERA: [&str; 2] = ["engine_rank", "target_dp_group"];
