//! The built-in suites.

use std::sync::LazyLock;

use crate::suites::description::public_suites;
use crate::suites::suite::{Domain, Suite, SuiteClass};

/// All built-in suites, in the order of tables: for each domain its public suites, then its smoke
/// suite.
pub static BUILTIN_SUITES: LazyLock<Vec<Suite>> = LazyLock::new(|| {
    let of_domain = |domain: Domain| {
        let described = public_suites().iter().filter(move |suite| suite.domain == domain);
        let public = described.map(move |suite| Suite {
            name: suite.name.clone(),
            domain,
            class: suite.limit.map_or(SuiteClass::Extra, |limit| SuiteClass::Published(limit.get())),
        });
        public.chain([Suite { name: format!("smoke-{domain}"), domain, class: SuiteClass::Smoke }])
    };
    Domain::KNOWN.into_iter().flat_map(of_domain).collect()
});

impl Suite {
    /// The known suite of this name.
    pub fn find_builtin(name: &str) -> Option<&'static Self> {
        BUILTIN_SUITES.iter().find(|suite| suite.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suites::suite::check_name;

    #[test]
    fn names_are_file_names_and_unique() {
        for (i, suite) in BUILTIN_SUITES.iter().enumerate() {
            check_name(&suite.name).unwrap();
            assert!(BUILTIN_SUITES[..i].iter().all(|other| other.name != suite.name));
        }
    }
}
