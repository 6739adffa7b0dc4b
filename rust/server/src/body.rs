//! Reading a request's body within bounds of size and time.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use http_body_util::BodyExt;

/// Largest body in bytes.
pub const MAX_BODY: usize = 1024 * 1024;

/// Why a body could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyError {
    /// More than [`MAX_BODY`] bytes.
    TooLarge,
    /// It did not arrive in time.
    TooSlow,
    /// The connection or the encoding broke.
    Cut,
}

/// The whole of `body`.
pub async fn read(body: Body) -> Result<Vec<u8>, BodyError> {
    match tokio::time::timeout(MAX_TIME, read_all(body)).await {
        Ok(read) => read,
        Err(_elapsed) => Err(BodyError::TooSlow),
    }
}

async fn read_all(mut body: Body) -> Result<Vec<u8>, BodyError> {
    let expected = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    let mut read = Vec::with_capacity(expected.min(MAX_BODY));
    let mut size = 0_usize;
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| BodyError::Cut)?.into_data() else {
            continue;
        };
        size = size.saturating_add(data.len());
        if size > MAX_DRAINED {
            break;
        }
        if size <= MAX_BODY {
            read.extend_from_slice(&data);
        }
    }
    if size > MAX_BODY {
        return Err(BodyError::TooLarge);
    }
    Ok(read)
}

/// What is read and thrown away of a body that is too large: a client that is still sending when the
/// connection closes never sees the answer.
const MAX_DRAINED: usize = 16 * MAX_BODY;

const MAX_TIME: Duration = Duration::from_secs(10);
