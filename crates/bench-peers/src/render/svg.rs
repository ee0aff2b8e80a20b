//! Bar charts, one for each step and kind of figure.

use std::fmt::Write;

use crate::results::summary::{Figure, Metric, Summary};
use crate::results::verdict::number;
use crate::stores::StoreKind;

const CHART_WIDTH: usize = 460;
const LABEL_WIDTH: usize = 90;
const VALUE_WIDTH: usize = 90;
const BAR_HEIGHT: usize = 14;
const ROW_HEIGHT: usize = 20;
const TITLE_HEIGHT: usize = 30;
const COLUMNS: usize = 2;
const MARGIN: usize = 16;

/// What is drawn, where a step has it.
const METRICS: [(Metric, &str); 6] = [
    (Metric::OpsPerSecond, "operations a second"),
    (Metric::ReadP999, "read p99.9, us (less is better)"),
    (Metric::WriteP999, "write p99.9, us (less is better)"),
    (Metric::WriteMax, "longest write, us (less is better)"),
    (
        Metric::DeviceAmplification,
        "write amplification of the device (less is better)",
    ),
    (
        Metric::ProcessorSeconds,
        "processor seconds (less is better)",
    ),
];

struct Chart<'a> {
    title: String,
    bars: Vec<(&'a str, Figure)>,
}

/// All charts in one picture.
pub(crate) fn render(summary: &Summary) -> String {
    let charts = charts(summary);
    let heights: Vec<usize> = charts
        .chunks(COLUMNS)
        .map(|row| {
            let bars = row.iter().map(|chart| chart.bars.len()).max().unwrap_or(0);
            TITLE_HEIGHT + bars * ROW_HEIGHT + MARGIN
        })
        .collect();
    let width = COLUMNS * (CHART_WIDTH + MARGIN) + MARGIN;
    let height = heights.iter().sum::<usize>() + 2 * MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
    );
    let mut y = MARGIN;
    for (row, height) in charts.chunks(COLUMNS).zip(heights) {
        for (column, chart) in row.iter().enumerate() {
            draw(&mut svg, chart, MARGIN + column * (CHART_WIDTH + MARGIN), y);
        }
        y += height;
    }
    svg.push_str("</svg>\n");
    svg
}

fn charts(summary: &Summary) -> Vec<Chart<'_>> {
    let mut charts = Vec::new();
    for step in summary.steps() {
        for (metric, unit) in METRICS {
            let stores = summary.stores().into_iter();
            let bars: Vec<_> = stores
                .filter_map(|store| Some((store, summary.figure(store, step, metric)?)))
                .collect();
            if !bars.is_empty() {
                charts.push(Chart {
                    title: format!("{step}: {unit}"),
                    bars,
                });
            }
        }
    }
    charts
}

fn draw(svg: &mut String, chart: &Chart<'_>, x: usize, y: usize) {
    let _infallible = writeln!(
        svg,
        "<text x=\"{x}\" y=\"{}\" font-weight=\"bold\">{}</text>",
        y + 16,
        escaped(&chart.title)
    );
    let longest = chart.bars.iter().map(|(_, figure)| figure.max);
    let longest = longest.fold(f64::MIN_POSITIVE, f64::max);
    let room = (CHART_WIDTH - LABEL_WIDTH - VALUE_WIDTH) as f64;
    let length = |value: f64| (value / longest * room).clamp(0.0, room);
    for (place, (store, figure)) in chart.bars.iter().enumerate() {
        let top = y + TITLE_HEIGHT + place * ROW_HEIGHT;
        let (text_y, bar_x) = (top + BAR_HEIGHT - 3, x + LABEL_WIDTH);
        let ours = StoreKind::of_label(store).is_some_and(StoreKind::is_ours);
        let colour = if ours { "#d1600f" } else { "#7a8ca3" };
        let (low, high) = (
            bar_x as f64 + length(figure.min),
            bar_x as f64 + length(figure.max),
        );
        let _infallible = writeln!(
            svg,
            "<text x=\"{x}\" y=\"{text_y}\">{}</text>\n\
             <rect x=\"{bar_x}\" y=\"{top}\" width=\"{:.1}\" height=\"{BAR_HEIGHT}\" fill=\"{colour}\"/>\n\
             <line x1=\"{low:.1}\" x2=\"{high:.1}\" y1=\"{middle}\" y2=\"{middle}\" stroke=\"#000\"/>\n\
             <text x=\"{:.1}\" y=\"{text_y}\">{}</text>",
            escaped(store),
            length(figure.median).max(1.0),
            high + 4.0,
            number(figure.median),
            middle = top + BAR_HEIGHT / 2,
        );
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::summary::tests::{part, step};

    #[test]
    fn the_longest_bar_has_all_the_room_and_tags_are_closed() {
        let of = |store, rate: f64| part(store, 1, vec![step("fill<seq>", rate)]);
        let svg = render(&Summary::new(vec![
            of("lightkv", 200.0),
            of("rocksdb", 100.0),
        ]));
        assert!(
            svg.contains("width=\"280.0\"") && svg.contains("width=\"140.0\""),
            "{svg}"
        );
        assert!(svg.contains("fill&lt;seq&gt;: operations a second"));
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn nothing_measured_is_an_empty_picture() {
        assert!(!render(&Summary::new(Vec::new())).contains("<text"));
    }
}
