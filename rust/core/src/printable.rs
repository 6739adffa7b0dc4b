//! Text that may hold what a peer sent, made fit for a terminal and a log line.

use core::fmt::{self, Display, Write};

/// Shows its content with every character escaped as `\xNN` that moves a cursor, breaks a line, or turns or hides text:
/// the controls, and Unicode's invisible and bidirectional format characters.
pub(crate) struct Printable<T>(pub(crate) T);

impl<T: Display> Display for Printable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escaping(f), "{}", self.0)
    }
}

struct Escaping<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl Write for Escaping<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text;
        while let Some(at) = rest.find(is_unprintable) {
            let (fit, tail) = rest.split_at(at);
            self.0.write_str(fit)?;
            let mut chars = tail.chars();
            if let Some(char) = chars.next() {
                write!(self.0, "\\x{:02x}", u32::from(char))?;
            }
            rest = chars.as_str();
        }
        self.0.write_str(rest)
    }
}

fn is_unprintable(char: char) -> bool {
    char.is_control()
        || matches!(char,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::Printable;
    use alloc::format;

    #[test]
    fn what_moves_breaks_or_hides_text_is_escaped_and_the_rest_is_not() {
        let text = "a\u{1b}[2J\nb\u{7f}\u{85}\u{202e}c\u{feff} \u{e4}\u{4e2d}\\";
        let shown = "a\\x1b[2J\\x0ab\\x7f\\x85\\x202ec\\xfeff \u{e4}\u{4e2d}\\";
        assert_eq!(format!("{}", Printable(text)), shown);
        assert_eq!(format!("{}", Printable(shown)), shown);
        assert_eq!(format!("{}", Printable("")), "");
    }
}
