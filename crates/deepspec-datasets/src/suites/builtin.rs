//! The built-in suites.

use std::sync::LazyLock;

use crate::suites::description::public;
use crate::suites::suite::{Class, Domain, Suite};

/// The suites that need no description, in the order of tables. Each domain has its public suites,
/// then the smoke suite.
pub static SUITES: LazyLock<Vec<Suite>> = LazyLock::new(|| {
    let of_domain = |domain: Domain| {
        let described = public().iter().filter(move |suite| suite.domain == domain);
        let public = described.map(move |suite| Suite {
            name: suite.name.clone(),
            domain,
            class: suite.limit.map_or(Class::Extra, |limit| Class::Published(limit.get())),
        });
        public.chain([Suite { name: format!("smoke-{domain}"), domain, class: Class::Smoke }])
    };
    Domain::KNOWN.into_iter().flat_map(of_domain).collect()
});

impl Suite {
    /// The known suite of this name.
    pub fn known(name: &str) -> Option<&'static Self> {
        SUITES.iter().find(|suite| suite.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suites::suite::check_name;

    #[test]
    fn names_are_file_names_and_unique() {
        for (i, suite) in SUITES.iter().enumerate() {
            check_name(&suite.name).unwrap();
            assert!(SUITES[..i].iter().all(|other| other.name != suite.name));
        }
    }
}
