//! The output directory: one file for each list, store and round, written when it has ended, so that an interrupted
//! run goes on where it was and nothing is measured twice.

use std::path::{Path, PathBuf};
use std::{fs, io};

use serde_json::Value;

use super::record::PartRecord;
use crate::failure::{Failure, with_path};

/// Says with which settings the directory was filled.
const SETTINGS_NAME: &str = "settings.json";

/// An output directory.
#[derive(Debug)]
pub(crate) struct Archive {
    directory: PathBuf,
}

impl Archive {
    /// Opens or makes the directory.
    ///
    /// # Errors
    /// [`Failure::OtherSettings`] if it holds figures of other settings.
    pub(crate) fn open(directory: &Path, settings: &Value) -> Result<Self, Failure> {
        fs::create_dir_all(directory).map_err(with_path(directory))?;
        let archive = Self {
            directory: directory.to_owned(),
        };
        let path = directory.join(SETTINGS_NAME);
        match fs::read(&path) {
            Ok(bytes) => {
                let found: Value = serde_json::from_slice(&bytes)?;
                if found != *settings {
                    return Err(Failure::OtherSettings {
                        path,
                        found: found.to_string(),
                        wanted: settings.to_string(),
                    });
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                archive.save(SETTINGS_NAME, &serde_json::to_vec_pretty(settings)?)?;
            }
            Err(error) => return Err(with_path(&path)(error)),
        }
        Ok(archive)
    }

    /// The result of a part, if it was measured already.
    pub(crate) fn find(
        &self,
        store: &str,
        list: &str,
        round: usize,
    ) -> Result<Option<PartRecord>, Failure> {
        let path = self.directory.join(file_name(store, list, round));
        match fs::read(&path) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(with_path(&path)(error)),
        }
    }

    /// Keeps the result of a part.
    pub(crate) fn keep(&self, part: &PartRecord) -> Result<(), Failure> {
        let name = file_name(&part.store, &part.list, part.round);
        self.save(&name, &serde_json::to_vec_pretty(part)?)
    }

    /// Writes a file of the directory, whole or not at all.
    pub(crate) fn save(&self, name: &str, bytes: &[u8]) -> Result<(), Failure> {
        let path = self.directory.join(name);
        let fresh = self.directory.join(format!("{name}.tmp"));
        fs::write(&fresh, bytes).map_err(with_path(&fresh))?;
        fs::rename(&fresh, &path).map_err(with_path(&path))
    }
}

fn file_name(store: &str, list: &str, round: usize) -> String {
    format!("part-{list}-{store}-{round}.json")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::record::Outcome;

    #[test]
    fn parts_are_found_again_and_settings_guard_them() {
        let directory = tempfile::tempdir().unwrap();
        let settings = serde_json::json!({"records": 5});
        let archive = Archive::open(directory.path(), &settings).unwrap();
        assert!(archive.find("redb", "random", 1).unwrap().is_none());
        archive
            .keep(&PartRecord {
                store: "redb".into(),
                list: "random".into(),
                round: 1,
                outcome: Outcome::Failed("x".into()),
                seconds: 1.0,
                limited: true,
                charged_peak_bytes: None,
                steps: Vec::new(),
            })
            .unwrap();
        let again = Archive::open(directory.path(), &settings).unwrap();
        let part = again.find("redb", "random", 1).unwrap().unwrap();
        assert_eq!(part.outcome, Outcome::Failed("x".into()));
        assert!(again.find("redb", "random", 2).unwrap().is_none());
        let other = Archive::open(directory.path(), &serde_json::json!({"records": 6}));
        assert!(matches!(other, Err(Failure::OtherSettings { .. })));
    }
}
