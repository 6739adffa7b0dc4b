//! Errors as data: which value broke which rule. Texts are built from the data when somebody reads them.

use alloc::string::{String, ToString};
use core::fmt;

use crate::printable::Printable;

/// A value that the caller of this library gave and that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InvalidValue {
    /// A number outside its inclusive range.
    OutOfRange {
        /// The argument's name.
        field: &'static str,
        /// What was given.
        value: u64,
        /// The least value allowed.
        min: u64,
        /// The greatest value allowed.
        max: u64,
    },
    /// A rank that its group does not have.
    RankNotBelowSize {
        /// The rank argument's name.
        field: &'static str,
        /// The rank given.
        rank: u32,
        /// The size argument's name.
        size_field: &'static str,
        /// The size of the group.
        size: u32,
    },
    /// The product of an engine's sizes is over [`MAX_RANKS`](crate::topology::MAX_RANKS).
    TooManyRanks {
        /// The product.
        ranks: u64,
        /// The greatest product allowed.
        max: u64,
    },
}

impl core::error::Error for InvalidValue {}

impl fmt::Display for InvalidValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfRange { field, value, min, max } => {
                write!(f, "{field} {value}: must be from {min} to {max}")
            }
            Self::RankNotBelowSize { field, rank, size_field, size } => {
                write!(f, "{field} {rank}: must be below {size_field} {size}")
            }
            Self::TooManyRanks { ranks, max } => {
                write!(f, "dp x cp x tp x pp is {ranks}: must be at most {max}")
            }
        }
    }
}

/// A peer's answer that breaks the protocol: which field, the value as it stood there, and the rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProtocolError {
    /// The key on the wire; `body` for the answer as a whole, `era` for an era that nothing ships any more.
    pub field: String,
    /// The value as JSON text, cut to [`MAX_VALUE_CHARS`]; empty when the field is missing.
    pub value: String,
    /// The rule that it breaks.
    pub rule: ProtocolRule,
}

impl ProtocolError {
    /// An error about `field`; `value` is cut to [`MAX_VALUE_CHARS`].
    #[must_use]
    pub fn new(field: &str, value: &str, rule: ProtocolRule) -> Self {
        Self { field: cut(field), value: cut(value), rule }
    }
}

impl core::error::Error for ProtocolError {}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.value.is_empty() {
            write!(f, "{}: {}", Printable(&self.field), self.rule)
        } else {
            write!(f, "{} {}: {}", Printable(&self.field), Printable(&self.value), self.rule)
        }
    }
}

/// The rules of the wire that an answer can break (WIRE.md section 3, DESIGN.md section 8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtocolRule {
    /// The body is not one JSON value in UTF-8, or is nested too deeply.
    NotJson,
    /// The body is JSON, but not an object.
    NotAnObject,
    /// Not a list.
    NotAList,
    /// A key stands twice in one object, or a rank in one list.
    DuplicateKey,
    /// A size stands under its old and its new name, with different values.
    TwoNames,
    /// A required key is absent.
    Missing,
    /// Null where a size has to be: the engine's ranks have not all registered yet.
    NotReady,
    /// The answer is of an era before attention-TP sizes (E0, E1).
    Era,
    /// Not an integer and not a string of ASCII digits.
    NotAnInteger,
    /// An integer outside its inclusive range.
    OutOfRange {
        /// The least value allowed.
        min: u64,
        /// The greatest value allowed.
        max: u64,
    },
    /// The product of the sizes is too large.
    TooManyRanks {
        /// The greatest product allowed.
        max: u64,
    },
    /// None of the spellings of a boolean.
    NotABoolean,
    /// Neither a string nor null.
    NotAString,
    /// Neither an object nor null.
    NotAnObjectOrNull,
    /// Not an IP address and not a host name.
    NotAHost,
}

impl fmt::Display for ProtocolRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotJson => "must be json",
            Self::NotAnObject => "must be a json object",
            Self::NotAList => "must be a list",
            Self::DuplicateKey => "must stand only once",
            Self::TwoNames => "must not differ from the same size under its other name",
            Self::Missing => "must be present",
            Self::NotReady => "must not be null: the engine is not registered completely",
            Self::Era => "must be of a protocol era with attn_tp_size",
            Self::NotAnInteger => "must be an integer or a string of ascii digits",
            Self::OutOfRange { min, max } => return write!(f, "must be from {min} to {max}"),
            Self::TooManyRanks { max } => {
                return write!(f, "dp x cp x tp x pp must be at most {max}");
            }
            Self::NotABoolean => "must be true, false, 0, 1, \"true\" or \"false\"",
            Self::NotAString => "must be a string or null",
            Self::NotAnObjectOrNull => "must be an object or null",
            Self::NotAHost => "must be an ip address or a host name",
        })
    }
}

/// How much of a peer's value an error keeps, in characters: enough to recognise it, too little to flood a log.
pub const MAX_VALUE_CHARS: usize = 80;

fn cut(text: &str) -> String {
    match text.char_indices().nth(MAX_VALUE_CHARS) {
        None => text.to_string(),
        Some((end, _)) => text.get(..end).unwrap_or_default().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;

    #[test]
    fn a_long_value_is_cut_at_a_character_border() {
        let error = ProtocolError::new("a", &"é".repeat(100), ProtocolRule::NotAString);
        assert_eq!(error.value.chars().count(), MAX_VALUE_CHARS);
    }

    #[test]
    fn a_message_names_the_field_the_value_and_the_rule() {
        let rule = ProtocolRule::OutOfRange { min: 1, max: 9 };
        let error = ProtocolError::new("pp_size", "0", rule);
        assert_eq!(format!("{error}"), "pp_size 0: must be from 1 to 9");
        let error = ProtocolError::new("pp_size", "", ProtocolRule::Missing);
        assert_eq!(format!("{error}"), "pp_size: must be present");
    }

    #[test]
    fn a_caller_s_mistake_names_the_argument_the_value_and_the_rule() {
        let error =
            InvalidValue::RankNotBelowSize { field: "pp_rank", rank: 2, size_field: "pp_size", size: 2 };
        assert_eq!(format!("{error}"), "pp_rank 2: must be below pp_size 2");
        let error = InvalidValue::TooManyRanks { ranks: 70_000, max: 65_536 };
        assert_eq!(format!("{error}"), "dp x cp x tp x pp is 70000: must be at most 65536");
        let error = InvalidValue::OutOfRange { field: "dp_size", value: 0, min: 1, max: 5 };
        assert_eq!(format!("{error}"), "dp_size 0: must be from 1 to 5");
    }
}
