use std::time::Instant;
fn main() {
    let mut args = std::env::args().skip(1);
    let dir = args.next().unwrap();
    let n: u64 = args.next().unwrap().parse().unwrap();
    let options = lightkv::Options::new().memory_budget(2 << 30);
    let start = Instant::now();
    let db = options.open(&dir).unwrap();
    eprintln!("open {:?}", start.elapsed());
    if n > 0 {
        let value = vec![7u8; 1024];
        let mut k = 1u64;
        for _ in 0..n {
            k = k.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            db.put(format!("{k:016x}"), &value).unwrap();
        }
    }
    unsafe { libc_exit() };
}
unsafe extern "C" { fn _exit(code: i32) -> !; }
unsafe fn libc_exit() { unsafe { _exit(9) } }
