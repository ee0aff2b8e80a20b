//! What the paper says, with what was measured; and whether what we aim at holds.

use serde::Serialize;

use super::figure::{Figure, VARIANTS, YCSB};
use super::figures::{Figures, Metric};
use super::published as paper;
use super::variant::Variant;
use crate::results::verdict::number;

/// A statement with its answer.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Claim {
    pub(crate) what: String,
    pub(crate) paper: String,
    pub(crate) here: String,
    /// Our own aim, and whether it is met; `None` where there is none, or nothing was measured.
    pub(crate) aim: Option<String>,
    pub(crate) holds: Option<bool>,
}

impl Claim {
    fn new(what: impl Into<String>, paper: impl Into<String>, here: Option<String>) -> Self {
        Self {
            what: what.into(),
            paper: paper.into(),
            here: here.unwrap_or_else(|| "not measured".into()),
            aim: None,
            holds: None,
        }
    }

    /// The same with an aim for a ratio.
    fn at_most(mut self, ratio: Option<f64>, most: f64) -> Self {
        self.aim = Some(format!("at most {most}"));
        self.holds = ratio.map(|ratio| ratio <= most);
        self
    }

    fn at_least(mut self, ratio: Option<f64>, least: f64) -> Self {
        self.aim = Some(format!("at least {least}"));
        self.holds = ratio.map(|ratio| ratio >= least);
        self
    }
}

fn ratio_text(ratio: Option<f64>) -> Option<String> {
    ratio.map(|ratio| format!("{ratio:.2}"))
}

/// A ratio as what it is more or less than one.
fn change_text(ratio: Option<f64>) -> Option<String> {
    ratio.map(|ratio| format!("{:+.1} %", (ratio - 1.0) * 100.0))
}

/// All that the paper says of a figure.
pub(super) fn claims(figure: Figure, figures: &Figures) -> Vec<Claim> {
    let asked = Asked {
        figures,
        points: figures.names(|series| &series.point),
    };
    match figure {
        Figure::Figure5 => asked.rivals(
            Metric::MeanUs,
            [
                ("put", "latency -54.5 % to NVStore, -68.8 % to FPTree"),
                ("get", "-83.2 %, -86.6 %"),
                ("update", "-58.4 %, -59.1 %"),
                ("scan", "-77.7 %, -28.3 %"),
                ("delete", "-65.3 %, -45.0 %"),
            ],
        ),
        Figure::Figure6 => asked.rivals(
            Metric::OpsPerSecond,
            [
                ("put", "+10.4 % to NVStore, +55.9 % to FPTree"),
                ("get", "5.0 times, 6.4 times"),
                ("update", "+19.6 %, +19.6 %"),
                ("scan", "3.8 times, +41.2 %"),
                ("delete", "+43.2 %, -10.0 %"),
            ],
        ),
        Figure::Figure7 => asked.scaling(),
        Figure::Figure8 => asked.first_to_last([
            (
                "put",
                "less as the latency grows; at 1,400 ns +17.6 % to NVStore, +32.9 % to FPTree",
            ),
            ("update", "the same; +80.0 %, +38.4 %"),
            ("delete", "stable below 1,400 ns; +39.9 %, +24.6 %"),
        ]),
        Figure::Figure9 => asked.first_to_last(paper::DATA_GROWTH),
        Figure::Figure10 => asked.variants(),
        Figure::Figure11 => asked.adaption(),
        Figure::Figure12 => asked.reads(),
        Figure::Figure13 => asked.memory(),
        Figure::Recovery => asked.recovery(),
    }
}

struct Asked<'a> {
    figures: &'a Figures,
    /// Points of the axis, in order.
    points: Vec<&'a str>,
}

impl Asked<'_> {
    fn ours(&self, point: &str, step: &str, metric: Metric) -> Option<f64> {
        self.figures.median(Variant::HiKv, point, step, metric)
    }

    /// Ours alone: the paper's rivals are not here.
    fn rivals<const N: usize>(&self, metric: Metric, said: [(&str, &str); N]) -> Vec<Claim> {
        let point = self.points.first().copied().unwrap_or_default();
        let unit = if metric == Metric::MeanUs {
            "us"
        } else {
            "a second"
        };
        said.map(|(step, paper)| {
            let here = self.ours(point, step, metric);
            let here = here.map(|here| format!("{} {unit}; no rivals here", number(here)));
            Claim::new(step, paper, here)
        })
        .to_vec()
    }

    fn scaling(&self) -> Vec<Claim> {
        let (Some(first), Some(last)) = (self.points.first(), self.points.last()) else {
            return Vec::new();
        };
        let claim = |((step, _), scaling): ((&str, _), f64)| {
            let of = |point: &str| self.ours(point, step, Metric::OpsPerSecond);
            let here = of(last).zip(of(first)).map(|(last, first)| last / first);
            let paper = format!("{scaling} times with 32 threads to 2");
            Claim::new(
                format!("{step}, {last} to {first}"),
                paper,
                ratio_text(here),
            )
        };
        YCSB.into_iter().zip(paper::SCALING).map(claim).collect()
    }

    fn first_to_last<const N: usize>(&self, said: [(&str, &str); N]) -> Vec<Claim> {
        let (Some(first), Some(last)) = (self.points.first(), self.points.last()) else {
            return Vec::new();
        };
        said.map(|(step, paper)| {
            let of = |point: &str| self.ours(point, step, Metric::OpsPerSecond);
            let here = of(last).zip(of(first)).map(|(last, first)| last / first);
            let what = format!("throughput of {step}, {last} to {first}");
            Claim::new(what, paper, change_text(here))
        })
        .to_vec()
    }

    fn variants(&self) -> Vec<Claim> {
        let said = [
            (Variant::Synchronous, "0.422 to 0.533"),
            (Variant::RangePartitioned, "0.826 to 0.888"),
            (Variant::WriteAheadLog, "down to 0.726, at 1400 ns"),
        ];
        debug_assert_eq!(said.len() + 1, VARIANTS.len());
        let mut claims = Vec::new();
        for (variant, paper) in said {
            for point in &self.points {
                let theirs = self.figures.median(variant, point, "put", Metric::MeanUs);
                let ours = self.ours(point, "put", Metric::MeanUs);
                let ratio = ours.zip(theirs).map(|(ours, theirs)| ours / theirs);
                let what = format!("put, latency to that of {}, {point}", variant.name());
                let claim = Claim::new(what, paper, ratio_text(ratio));
                claims.push(match (variant, *point) {
                    (Variant::Synchronous, "600 ns") => claim.at_most(ratio, 0.55),
                    (Variant::WriteAheadLog, "1400 ns") => claim.at_most(ratio, 0.85),
                    _ => claim,
                });
            }
        }
        claims
    }

    fn adaption(&self) -> Vec<Claim> {
        let point = self.points.first().copied().unwrap_or_default();
        let paper = ["-1.6 % to the best", "", "", "", "", ""].map(|said| match said {
            "" => "the best; +10.5 % to +100 % to 8-8, +10.4 % to +37.5 % to 12-4",
            said => said,
        });
        let variants = self.figures.names(|series| &series.variant);
        let ours_name = Variant::HiKv.name();
        let claim = |((step, _), paper): ((&str, _), &str)| {
            let fixed = variants.iter().filter(|name| **name != ours_name);
            let best = fixed
                .filter_map(|name| {
                    let of = self
                        .figures
                        .median_of(name, point, step, Metric::OpsPerSecond);
                    Some((of?, *name))
                })
                .max_by(|a, b| a.0.total_cmp(&b.0));
            let ours = self.ours(point, step, Metric::OpsPerSecond);
            let ratio = ours.zip(best).map(|(ours, (best, _))| ours / best);
            let name = best.map_or("a fixed split", |(_, name)| name);
            Claim::new(format!("{step}, to {name}"), paper, ratio_text(ratio)).at_least(ratio, 0.95)
        };
        YCSB.into_iter().zip(paper).map(claim).collect()
    }

    fn reads(&self) -> Vec<Claim> {
        let [without, with] = self.points[..] else {
            return Vec::new();
        };
        let said = [
            ("get", "more; still -80.0 % to NVStore, -82.3 % to FPTree"),
            ("scan", "more; still -61.8 %, -13.0 %"),
            ("put", "more"),
            ("update", "more"),
            ("delete", "more"),
        ];
        said.map(|(step, paper)| {
            let of = |point| self.ours(point, step, Metric::MeanUs);
            let ratio = of(with)
                .zip(of(without))
                .map(|(with, without)| with / without);
            Claim::new(
                format!("latency of {step}, {with}"),
                paper,
                change_text(ratio),
            )
        })
        .to_vec()
    }

    fn memory(&self) -> Vec<Claim> {
        let memory = |point: &str| self.ours(point, "space", Metric::MemoryBytes);
        let keys = |point: &str| self.ours(point, "space", Metric::Keys);
        let mut claims = Vec::new();
        if let Some(point) = self.points.first() {
            let here = memory(point)
                .zip(keys(point))
                .map(|(bytes, keys)| bytes / keys);
            let paper = format!(
                "{:.1}, of the ordered index alone",
                paper::MEMORY_BYTES_A_KEY
            );
            let claim = Claim::new(
                "memory a key in bytes, all indexes",
                paper,
                ratio_text(here),
            );
            claims.push(claim.at_most(here, 44.0));
        }
        for (len_bytes, ratio) in paper::MEMORY_TO_POOL {
            let point = format!("{len_bytes} B");
            let pool = self.ours(&point, "space", Metric::PoolBytes);
            let here = memory(&point).zip(pool).map(|(memory, pool)| memory / pool);
            let what = format!("memory to persistent memory, values of {point}");
            claims.push(Claim::new(
                what,
                ratio.to_string(),
                here.map(|here| format!("{here:.3}")),
            ));
        }
        claims
    }

    fn recovery(&self) -> Vec<Claim> {
        let paper = [
            (
                self.points.first(),
                paper::RECOVERED_A_SECOND[0],
                "1 thread",
            ),
            (
                self.points.last(),
                paper::RECOVERED_A_SECOND[1],
                "16 threads",
            ),
        ];
        paper
            .into_iter()
            .filter_map(|(point, a_second, threads)| {
                let point = point?;
                let here = self.ours(point, "recovery", Metric::OpsPerSecond);
                let cores: f64 = point.split(' ').next()?.parse().ok()?;
                let here_text = here.map(number);
                let what = format!("keys recovered a second, {point}");
                let paper = format!("{} with {threads}", number(a_second));
                let claim = Claim::new(what, paper, here_text);
                let each = here.map(|here| here / cores);
                Some(Claim {
                    aim: Some("at least 1,200,000 a core".into()),
                    holds: each.map(|each| each >= 1.2e6),
                    ..claim
                })
            })
            .collect()
    }
}
