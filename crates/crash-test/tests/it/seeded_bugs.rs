//! The patches of `seeded-bugs` fit the source: without that nobody would notice that they prove nothing any more.

use std::path::Path;
use std::process::Command;

#[test]
fn every_seeded_bug_applies_and_says_what_it_is() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = package.join("../..");
    let mut patches: Vec<_> = std::fs::read_dir(package.join("seeded-bugs"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "patch")
        })
        .collect();
    patches.sort();
    assert!(patches.len() >= 40, "{} patches", patches.len());
    for patch in &patches {
        let text = std::fs::read_to_string(patch).unwrap();
        let name = patch.display();
        assert!(
            !text.starts_with("---"),
            "{name}: its first line does not say what is wrong"
        );
        for line in text.lines() {
            let Some(file) = line.strip_prefix("--- a/") else {
                continue;
            };
            assert!(root.join(file).is_file(), "{name}: there is no {file}");
        }
        let output = Command::new("patch")
            .args(["--strip=1", "--dry-run", "--silent", "--force", "--input"])
            .arg(patch.canonicalize().unwrap())
            .current_dir(&root)
            .output()
            .expect("patch runs");
        assert!(
            output.status.success(),
            "{name} does not apply: {}",
            String::from_utf8_lossy(&output.stdout)
        );
    }
}
