//! Links LevelDB where it was asked for. Statically: only the archive has the switch that turns its mappings off.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=LEVELDB_LIB_DIR");
    if std::env::var_os("CARGO_FEATURE_LEVELDB").is_none() {
        return;
    }
    // Where Debian and Ubuntu put it.
    let directory =
        std::env::var("LEVELDB_LIB_DIR").unwrap_or_else(|_| "/usr/lib/x86_64-linux-gnu".to_owned());
    println!("cargo::rustc-link-search=native={directory}");
    println!("cargo::rustc-link-lib=static:-bundle=leveldb");
    println!("cargo::rustc-link-lib=dylib=snappy");
    println!("cargo::rustc-link-lib=dylib=stdc++");
}
