//! Numbers from Python: what is not an int is a `TypeError`, what is out of range a `ValueError`, both naming the argument.

use std::convert::Infallible;

use disagg_core::ids::Room;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt};

/// A number as it was given: taking it in never fails, so that the error can name the argument.
pub enum Whole {
    /// Fits the widest argument.
    Number(u32),
    /// An int that fits none, as text.
    OutOfRange(String),
    /// Something else, as text; bools are no numbers here.
    NotAnInt(String),
}

impl Whole {
    /// The number, if it is from `min` to `max`.
    pub fn within(self, name: &str, min: u32, max: u32) -> PyResult<u32> {
        let value = match self {
            Self::Number(number) if (min..=max).contains(&number) => return Ok(number),
            Self::Number(number) => number.to_string(),
            Self::OutOfRange(text) => text,
            Self::NotAnInt(text) => {
                return Err(PyTypeError::new_err(format!("{name} {text}: must be an int")));
            }
        };
        Err(PyValueError::new_err(format!("{name} {value}: must be from {min} to {max}")))
    }
}

impl<'py> FromPyObject<'_, 'py> for Whole {
    type Error = Infallible;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> Result<Self, Infallible> {
        if object.is_instance_of::<PyBool>() {
            return Ok(Self::NotAnInt(object.to_string()));
        }
        Ok(match object.extract::<u32>() {
            Ok(number) => Self::Number(number),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                Self::OutOfRange(object.to_string())
            }
            Err(_) => Self::NotAnInt(object.to_string()),
        })
    }
}

/// The call that builds a value again: `Name(field=value, ...)`.
pub fn constructor_form(name: &str, fields: &[(&'static str, Bound<'_, PyAny>)]) -> PyResult<String> {
    let parts = fields
        .iter()
        .map(|(field, value)| Ok(format!("{field}={}", value.repr()?)))
        .collect::<PyResult<Vec<_>>>()?;
    Ok(format!("{name}({})", parts.join(", ")))
}

/// A room, as `add` and `fail_room` take it.
pub fn room_of(room: &Bound<'_, PyAny>) -> PyResult<Room> {
    let number = room.cast_exact::<PyInt>().ok().and_then(|room| room.extract::<u64>().ok());
    number.and_then(Room::new).ok_or_else(|| {
        PyValueError::new_err(format!("room {} is not an int from 0 to 9223372036854775807", shown(room)))
    })
}

/// The dp rank that a router chose.
pub fn preset_of(dp_rank: &Bound<'_, PyAny>) -> PyResult<u32> {
    let number = dp_rank.cast_exact::<PyInt>().ok().and_then(|rank| rank.extract::<u64>().ok());
    let number = number.filter(|&rank| rank < 1 << 63).ok_or_else(|| {
        PyValueError::new_err(format!(
            "dp_rank {} is not an int from 0 to 9223372036854775807",
            shown(dp_rank)
        ))
    })?;
    // No engine has that many: the request fails when the peer is known, with the largest number that fits.
    Ok(u32::try_from(number).unwrap_or(u32::MAX))
}

fn shown(value: &Bound<'_, PyAny>) -> String {
    value.repr().map_or_else(|_| String::from("?"), |text| text.to_string().chars().take(80).collect())
}
