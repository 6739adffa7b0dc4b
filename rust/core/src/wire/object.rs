//! One JSON object whose values stay text until somebody asks: integers must not pass through a float first.

use alloc::borrow::Cow;
use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Number, Value};

use crate::error::{MAX_VALUE_CHARS, ProtocolError, ProtocolRule};

/// The entries of an object in the order of the body, duplicates included.
pub(super) struct Object<'a>(Vec<(Text<'a>, &'a RawValue)>);

impl<'a> Object<'a> {
    pub(super) fn parse(body: &'a [u8]) -> Result<Self, ProtocolError> {
        serde_json::from_slice(body).map_err(|error| {
            // The object parser stops at the first character of anything else; whether the rest is JSON has to be asked.
            let is_json = error.is_data() && serde_json::from_slice::<IgnoredAny>(body).is_ok();
            let rule = if is_json { ProtocolRule::NotAnObject } else { ProtocolRule::NotJson };
            // A character has at most four bytes; a page of HTML is recognised by its start.
            let start = body.get(..MAX_VALUE_CHARS * 4).unwrap_or(body);
            ProtocolError::new("body", &String::from_utf8_lossy(start), rule)
        })
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = Raw<'_>> {
        self.0.iter().map(|(key, value)| Raw { key: key.0.as_ref(), text: value.get() })
    }

    /// The entries by key; a key that stands twice is an error.
    pub(super) fn unique(&self) -> Result<Fields<'_>, ProtocolError> {
        let mut fields = BTreeMap::new();
        for raw in self.entries() {
            if fields.insert(raw.key, raw).is_some() {
                return Err(raw.refused(ProtocolRule::DuplicateKey));
            }
        }
        Ok(Fields(fields))
    }
}

impl<'de> Deserialize<'de> for Object<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Object<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Object(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// An object's entries by key.
pub(super) struct Fields<'a>(BTreeMap<&'a str, Raw<'a>>);

impl<'a> Fields<'a> {
    pub(super) fn find(&self, key: &str) -> Option<Raw<'a>> {
        self.0.get(key).copied()
    }

    /// The field unless it is absent or null, which mean the same for an optional one.
    pub(super) fn stated(&self, key: &str) -> Option<Raw<'a>> {
        self.find(key).filter(|raw| !raw.is_null())
    }

    pub(super) fn required(&self, key: &str) -> Result<Raw<'a>, ProtocolError> {
        self.find(key).ok_or_else(|| ProtocolError::new(key, "", ProtocolRule::Missing))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Raw<'a>> {
        self.0.values().copied()
    }
}

/// One field: its key and its value as JSON text.
#[derive(Clone, Copy)]
pub(super) struct Raw<'a> {
    pub(super) key: &'a str,
    text: &'a str,
}

impl<'a> Raw<'a> {
    pub(super) fn refused(self, rule: ProtocolRule) -> ProtocolError {
        ProtocolError::new(self.key, self.text, rule)
    }

    pub(super) fn is_null(self) -> bool {
        self.text == "null"
    }

    /// A JSON integer or a string of ASCII digits, without sign, from `min` to `max`.
    pub(super) fn integer(self, min: u64, max: u64) -> Result<u64, ProtocolError> {
        let digits = self.string()?.unwrap_or(Cow::Borrowed(self.text));
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(self.refused(ProtocolRule::NotAnInteger));
        }
        digits
            .parse()
            .ok()
            .filter(|number| (min..=max).contains(number))
            .ok_or_else(|| self.refused(ProtocolRule::OutOfRange { min, max }))
    }

    /// `true`, `false`, 0, 1, `"true"` or `"false"`; plain truthiness would read `"false"` as true.
    pub(super) fn boolean(self) -> Result<bool, ProtocolError> {
        match self.string()?.as_deref().unwrap_or(self.text) {
            "true" => Ok(true),
            "false" => Ok(false),
            "1" if self.text == "1" => Ok(true),
            "0" if self.text == "0" => Ok(false),
            _ => Err(self.refused(ProtocolRule::NotABoolean)),
        }
    }

    /// The string that the value is, or `None` if it is something else.
    pub(super) fn string(self) -> Result<Option<Cow<'a, str>>, ProtocolError> {
        if !self.text.starts_with('"') {
            return Ok(None);
        }
        // Only an unpaired surrogate fails here: the text has passed the parser as raw JSON.
        match serde_json::from_str::<Text<'a>>(self.text) {
            Ok(text) => Ok(Some(text.0)),
            Err(_) => Err(self.refused(ProtocolRule::NotJson)),
        }
    }

    /// The value as an object of its own.
    pub(super) fn object(self) -> Result<Object<'a>, ProtocolError> {
        Object::parse(self.text.as_bytes()).map_err(|_| self.refused(ProtocolRule::NotAnObject))
    }

    /// The items of a list, each under the list's key.
    pub(super) fn items(self) -> Result<Vec<Self>, ProtocolError> {
        let items: Result<Vec<&'a RawValue>, _> = serde_json::from_str(self.text);
        let items = items.map_err(|_| self.refused(ProtocolRule::NotAList))?;
        Ok(items.into_iter().map(|item| Self { key: self.key, text: item.get() }).collect())
    }

    /// The value as a tree, without duplicate keys at any depth.
    pub(super) fn tree(self) -> Result<Value, ProtocolError> {
        serde_json::from_str(self.text).map(|tree: Tree| tree.0).map_err(|error| {
            // Duplicates are the only complaint that `Tree` itself has.
            self.refused(if error.is_data() { ProtocolRule::DuplicateKey } else { ProtocolRule::NotJson })
        })
    }
}

/// A string, borrowed where it has no escapes.
struct Text<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Borrow;
        impl<'de> Visitor<'de> for Borrow {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(text.to_string())))
            }
        }
        deserializer.deserialize_str(Borrow)
    }
}

/// A JSON value without duplicate keys.
struct Tree(Value);

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Grow)
    }
}

struct Grow;

impl<'de> Visitor<'de> for Grow {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value without duplicate keys")
    }

    fn visit_unit<E>(self) -> Result<Tree, E> {
        Ok(Tree(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Tree, E> {
        Ok(Tree(Value::Bool(value)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Tree, E> {
        Ok(Tree(Value::Number(value.into())))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Tree, E> {
        Ok(Tree(Value::Number(value.into())))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Tree, E> {
        Ok(Tree(Number::from_f64(value).map_or(Value::Null, Value::Number)))
    }

    fn visit_str<E>(self, value: &str) -> Result<Tree, E> {
        Ok(Tree(Value::String(value.to_string())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Tree, A::Error> {
        let mut items = Vec::new();
        while let Some(Tree(item)) = seq.next_element()? {
            items.push(item);
        }
        Ok(Tree(Value::Array(items)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tree, A::Error> {
        let mut entries = Map::new();
        while let Some((key, Tree(value))) = map.next_entry::<String, Tree>()? {
            if entries.insert(key, value).is_some() {
                return Err(de::Error::custom("duplicate key"));
            }
        }
        Ok(Tree(Value::Object(entries)))
    }
}
