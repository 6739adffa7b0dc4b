//! Strict reading of a JSON object, field by field.
//!
//! Integers are JSON integers or strings of ASCII digits; a null optional is an absent one; a key
//! that stands twice in any object refuses the body.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::refusal::BadInput;

/// The fields of one body.
pub struct Fields(Map<String, Value>);

impl Fields {
    pub fn from_json(body: &[u8]) -> Result<Self, BadInput> {
        match serde_json::from_slice(body) {
            Ok(Unique(Value::Object(fields))) => Ok(Self(fields)),
            Ok(Unique(_)) => Err(BadInput::NotAnObject),
            Err(error) => Err(BadInput::Json { reason: shown(&error.to_string()) }),
        }
    }

    /// The value of `field` unless it is absent or null.
    pub fn value(&self, field: &str) -> Option<&Value> {
        self.0.get(field).filter(|value| !value.is_null())
    }

    pub fn required(&self, field: &'static str) -> Result<&Value, BadInput> {
        self.value(field).ok_or(BadInput::Missing { field })
    }

    pub fn integer(&self, field: &'static str, min: u64, max: u64) -> Result<u64, BadInput> {
        integer(field, self.required(field)?, min, max)
    }

    pub fn optional_integer(&self, field: &'static str, min: u64, max: u64) -> Result<Option<u64>, BadInput> {
        self.value(field).map(|value| integer(field, value, min, max)).transpose()
    }

    /// A string of at most [`MAX_TEXT`] bytes without control characters.
    pub fn optional_text(&self, field: &'static str) -> Result<Option<String>, BadInput> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::String(text)) if text.len() <= MAX_TEXT && !has_controls(text) => {
                Ok(Some(text.to_owned()))
            }
            Some(value) => Err(refused(field, value, "must be a string of at most 255 bytes")),
        }
    }

    /// A boolean as any client spells one; plain truthiness would read "false" as true.
    pub fn flag(&self, field: &'static str) -> Result<bool, BadInput> {
        let Some(value) = self.value(field) else {
            return Ok(false);
        };
        match value {
            Value::Bool(flag) => Ok(*flag),
            Value::Number(number) if number.as_u64() == Some(0) => Ok(false),
            Value::Number(number) if number.as_u64() == Some(1) => Ok(true),
            Value::String(text) if text == "true" => Ok(true),
            Value::String(text) if text == "false" => Ok(false),
            _ => Err(refused(field, value, "must be a boolean")),
        }
    }
}

/// Reads `value` as an integer in `min..=max`.
pub fn integer(field: &'static str, value: &Value, min: u64, max: u64) -> Result<u64, BadInput> {
    let parsed = match value {
        Value::Number(number) => number.as_u64(),
        Value::String(digits) if is_digits(digits) => Some(saturating(digits)),
        _ => None,
    };
    match parsed {
        Some(number) if (min..=max).contains(&number) => Ok(number),
        Some(_) => Err(BadInput::Range { field, value: shown(&value.to_string()), min, max }),
        None => Err(refused(field, value, "must be an integer, as such or in ASCII digits")),
    }
}

pub fn refused(field: &'static str, value: &Value, rule: &'static str) -> BadInput {
    BadInput::Value { field, value: shown(&value.to_string()), rule }
}

/// Whether `text` is one or more ASCII digits.
pub fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// The number that `digits` spell, or the greatest there is: no range reaches that far.
pub fn saturating(digits: &str) -> u64 {
    digits.parse().unwrap_or(u64::MAX)
}

/// `text` cut to a length that fits into an error message.
pub fn shown(text: &str) -> String {
    if text.chars().nth(SHOWN).is_none() {
        return text.to_owned();
    }
    let head: String = text.chars().take(SHOWN).collect();
    format!("{head}...")
}

fn has_controls(text: &str) -> bool {
    text.chars().any(char::is_control)
}

/// A JSON value in which no object has a key twice.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueVisitor).map(Self)
    }
}

struct UniqueVisitor;

impl<'de> Visitor<'de> for UniqueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Value, E> {
        Ok(Value::Bool(flag))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(Value::from(number))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(Value::from(number))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
        Ok(Value::from(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(Value::from(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Unique(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some((key, Unique(value))) = entries.next_entry::<String, Unique>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format_args!("key {:?} stands twice", shown(&key))));
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

/// Longest string field: a host name has at most 253 characters.
const MAX_TEXT: usize = 255;
const SHOWN: usize = 80;
