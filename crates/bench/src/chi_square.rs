//! Whether counts agree with a distribution: Pearson's test, for the tests of this crate.

/// Fails unless classes that should be equally likely came equally often.
pub(crate) fn assert_even(classes: impl Iterator<Item = u64>, count: usize, what: &str) {
    let mut counts = vec![0_u64; count];
    for class in classes {
        counts[class as usize] += 1;
    }
    assert_agrees(&counts, &vec![1.0 / count as f64; count], what);
}

/// Fails unless `counts` are what draws with these probabilities give: the statistic lies within five
/// standard deviations of its mean, which chance exceeds less than once in a hundred thousand tests.
///
/// Every class must expect five draws at least.
pub(crate) fn assert_agrees(counts: &[u64], probabilities: &[f64], what: &str) {
    assert_eq!(counts.len(), probabilities.len());
    let draws = counts.iter().sum::<u64>() as f64;
    let total: f64 = probabilities.iter().sum();
    assert!((total - 1.0).abs() < 1e-9, "{what}: {total}");
    let statistic: f64 = counts
        .iter()
        .zip(probabilities)
        .map(|(count, probability)| {
            let expected = probability * draws;
            assert!(expected >= 5.0, "{what}: a class expects {expected}");
            (*count as f64 - expected).powi(2) / expected
        })
        .sum();
    let freedom = (counts.len() - 1) as f64;
    let limit = freedom + 5.0 * (2.0 * freedom).sqrt() + 10.0;
    assert!(
        statistic < limit,
        "{what}: chi-square {statistic:.1}, at most {limit:.1} is likely: {counts:?}"
    );
}

#[test]
fn tells_right_from_slightly_wrong() {
    assert_agrees(&[5_030, 4_970], &[0.5, 0.5], "fair");
    let biased = std::panic::catch_unwind(|| assert_agrees(&[5_300, 4_700], &[0.5, 0.5], "biased"));
    assert!(biased.is_err());
}
