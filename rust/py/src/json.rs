//! JSON trees to and from plain Python values.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyNone, PyString, PyTuple};
use serde_json::{Map, Number, Value};

/// None, bool, int, float, str, list or dict.
pub fn to_python<'py>(py: Python<'py>, tree: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match tree {
        Value::Null => PyNone::get(py).to_owned().into_any(),
        Value::Bool(value) => PyBool::new(py, *value).to_owned().into_any(),
        Value::Number(number) => number_to_python(py, number)?,
        Value::String(text) => PyString::new(py, text).into_any(),
        Value::Array(items) => {
            let list = PyList::empty(py);
            for item in items {
                list.append(to_python(py, item)?)?;
            }
            list.into_any()
        }
        Value::Object(entries) => to_dict(py, entries.iter())?.into_any(),
    })
}

/// The entries as a dict.
pub fn to_dict<'py, 'a>(
    py: Python<'py>,
    entries: impl Iterator<Item = (&'a String, &'a Value)>,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (key, value) in entries {
        dict.set_item(key, to_python(py, value)?)?;
    }
    Ok(dict)
}

/// The dict as a JSON object; `name` is the argument that errors speak of.
///
/// As on the wire, an int beyond 64 bits becomes the nearest float.
pub fn to_object(name: &str, dict: &Bound<'_, PyDict>) -> PyResult<Map<String, Value>> {
    object(name, dict, 0)
}

fn object(name: &str, dict: &Bound<'_, PyDict>, depth: u32) -> PyResult<Map<String, Value>> {
    dict.iter()
        .map(|(key, value)| {
            let key = key
                .cast::<PyString>()
                .map_err(|_| PyTypeError::new_err(format!("{name} {key}: keys must be str")))?
                .extract()?;
            Ok((key, tree(name, &value, depth + 1)?))
        })
        .collect()
}

fn tree(name: &str, value: &Bound<'_, PyAny>, depth: u32) -> PyResult<Value> {
    if depth > MAX_DEPTH {
        return Err(PyValueError::new_err(format!("{name}: must not be nested more than {MAX_DEPTH} deep")));
    }
    if value.is_none() {
        return Ok(Value::Null);
    }
    if let Ok(value) = value.cast::<PyBool>() {
        return Ok(Value::Bool(value.is_true()));
    }
    if value.is_instance_of::<PyInt>() || value.is_instance_of::<PyFloat>() {
        return number(name, value).map(Value::Number);
    }
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(Value::String(text.extract()?));
    }
    if let Ok(dict) = value.cast::<PyDict>() {
        return Ok(Value::Object(object(name, dict, depth)?));
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let items = value.try_iter()?;
        return items.map(|item| tree(name, &item?, depth + 1)).collect();
    }
    Err(PyTypeError::new_err(format!("{name} {value}: must be a json value")))
}

fn number(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Number> {
    if value.is_instance_of::<PyInt>() {
        if let Ok(whole) = value.extract::<i64>() {
            return Ok(whole.into());
        }
        if let Ok(whole) = value.extract::<u64>() {
            return Ok(whole.into());
        }
    }
    let nearest = value.extract::<f64>().ok().and_then(Number::from_f64);
    nearest.ok_or_else(|| PyValueError::new_err(format!("{name} {value}: must be a finite number")))
}

fn number_to_python<'py>(py: Python<'py>, number: &Number) -> PyResult<Bound<'py, PyAny>> {
    if let Some(whole) = number.as_i64() {
        return Ok(whole.into_pyobject(py)?.into_any());
    }
    if let Some(whole) = number.as_u64() {
        return Ok(whole.into_pyobject(py)?.into_any());
    }
    Ok(PyFloat::new(py, number.as_f64().unwrap_or(f64::NAN)).into_any())
}

/// What the parser of the wire allows too.
const MAX_DEPTH: u32 = 127;
