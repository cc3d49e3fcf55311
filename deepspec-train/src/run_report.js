const rows = data.rows.filter((row) => row.loss !== undefined);
const evaluations = data.rows.filter((row) => row.eval && typeof row.eval.tau === "number");
const series = (name, key) => ({ name, points: rows.map((row) => [row.step, row[key]]) });
const draw = (id, lines, options) => lineChart(document.getElementById(id), lines, { x: "optimizer step", ...options });

const losses = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((key) => key.endsWith("_loss") && rows.some((row) => typeof row[key] === "number"));
draw("loss", [series("loss", "loss")], { y: "loss", title: "Loss" });
draw("terms", losses.map((key) => series(key.replace("_loss", ""), key)), { y: "loss", title: "Terms of the loss, unweighted", fromZero: true });
draw("tau", [
  series("training samples", "tau_probabilistic"),
  { name: "evaluation", dots: true, points: evaluations.map((row) => [row.step, row.eval.tau]) },
], { y: "tokens per cycle", title: "Accepted length τ" });
const at = [0, Math.floor(rows.length / 4), Math.floor(rows.length / 2), rows.length - 1].filter((place, index, all) => rows[place] && all.indexOf(place) === index);
const rates = at.map((place) => ({
  name: `step ${rows[place].step}`,
  points: (rows[place].accept_rate || []).map((rate, position) => [position + 1, rate]),
}));
draw("acceptance", rates, { x: "position in the block", y: "acceptance rate", title: "Acceptance by position, teacher-forced", fromZero: true });
draw("lr", [series("learning rate", "lr")], { y: "learning rate", title: "Learning rate", fromZero: true });
draw("grad", [series("norm", "grad_norm")], { y: "norm before clipping", title: "Gradient norm", fromZero: true });
draw("speed", [series("samples per second", "samples_per_s")], { y: "samples per second", title: "Speed", fromZero: true });
