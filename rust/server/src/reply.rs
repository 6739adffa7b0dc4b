//! Answers, each stamped with the snapshot it was read from.

use axum::http::header::{CONTENT_TYPE, HeaderName};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use disagg_core::registry::{BadInput, Conflict, LookupError, NotReady, Stamp};
use serde_json::{Value, json};

use crate::body::{BodyError, MAX_BODY};

/// One answer, its stamp apart.
#[derive(Debug)]
pub struct Reply {
    status: StatusCode,
    media_type: &'static str,
    body: String,
}

impl Reply {
    /// What upstream says to a write.
    pub fn ok() -> Self {
        Self { status: StatusCode::OK, media_type: TEXT, body: "OK".to_owned() }
    }

    pub fn json(body: String) -> Self {
        Self { status: StatusCode::OK, media_type: JSON, body }
    }

    pub fn refusal(status: StatusCode, error: &str, field: Option<&str>) -> Self {
        Self::error(status, &json!({"error": error, "field": field}))
    }

    /// Adds what the tables said to every answer at the time.
    pub fn stamped(self, stamp: &Stamp) -> Response {
        let headers = [(CONTENT_TYPE, HeaderValue::from_static(self.media_type))];
        let mut response = (self.status, headers, self.body).into_response();
        let epoch = HeaderValue::from(stamp.epoch);
        response.headers_mut().insert(EPOCH, epoch);
        if let Ok(instance) = HeaderValue::from_str(&stamp.instance) {
            response.headers_mut().insert(INSTANCE, instance);
        }
        response
    }

    fn error(status: StatusCode, body: &Value) -> Self {
        Self { status, media_type: JSON, body: body.to_string() }
    }
}

impl From<BadInput> for Reply {
    fn from(why: BadInput) -> Self {
        let status = match why {
            BadInput::TooManyRooms { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            BadInput::Json { .. }
            | BadInput::NotAnObject
            | BadInput::Missing { .. }
            | BadInput::Value { .. }
            | BadInput::Range { .. }
            | BadInput::RankNotBelowSize { .. }
            | BadInput::TooManyRanks(_) => StatusCode::BAD_REQUEST,
        };
        Self::refusal(status, &why.to_string(), why.field())
    }
}

impl From<Conflict> for Reply {
    fn from(why: Conflict) -> Self {
        let status = if why.as_upstream { StatusCode::BAD_REQUEST } else { StatusCode::CONFLICT };
        let (registered, sent) = (&why.registered, &why.sent);
        let body =
            json!({"error": why.to_string(), "field": why.field, "registered": registered, "sent": sent});
        Self::error(status, &body)
    }
}

impl From<NotReady> for Reply {
    fn from(why: NotReady) -> Self {
        let missing: Vec<[u16; 4]> = why.missing.iter().map(|at| [at.dp, at.cp, at.tp, at.pp]).collect();
        let sizes = why.sizes.map(|sizes| [sizes.dp, sizes.cp, sizes.tp, sizes.pp]);
        let body = json!({"error": why.to_string(), "field": null, (NotReady::REGISTERED): why.registered,
                          (NotReady::SIZES): sizes, (NotReady::MISSING): missing});
        Self::error(StatusCode::SERVICE_UNAVAILABLE, &body)
    }
}

impl From<LookupError> for Reply {
    fn from(why: LookupError) -> Self {
        match why {
            LookupError::NotReady(why) => why.into(),
            LookupError::Unknown => Self::refusal(StatusCode::NOT_FOUND, &why.to_string(), None),
        }
    }
}

impl From<BodyError> for Reply {
    fn from(why: BodyError) -> Self {
        match why {
            BodyError::TooLarge => {
                let text = format!("body is larger than {MAX_BODY} bytes");
                Self::refusal(StatusCode::PAYLOAD_TOO_LARGE, &text, None)
            }
            BodyError::TooSlow => {
                let text = "body did not arrive in time";
                Self::refusal(StatusCode::REQUEST_TIMEOUT, text, None)
            }
            BodyError::Cut => Self::refusal(StatusCode::BAD_REQUEST, "body was cut off", None),
        }
    }
}

const INSTANCE: HeaderName = HeaderName::from_static("x-sglang-disaggregation-instance-id");
const EPOCH: HeaderName = HeaderName::from_static("x-disagg-epoch");
const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json; charset=utf-8";
