const element = (id) => document.getElementById(id);
const most = data.draft_lengths.length - 1;
element("length").max = most;

// Seconds of a table of requests × draft lengths, interpolated over requests.
function seconds(table, requests, length) {
  const all = data.requests;
  let after = all.findIndex((each) => each >= requests);
  if (after < 0) after = all.length - 1;
  const before = Math.max(after - 1, 0);
  const [low, high] = [table[before][length], table[after][length]];
  const share = all[after] === all[before] ? 0 : (requests - all[before]) / (all[after] - all[before]);
  return low + (high - low) * share;
}

function settings() {
  const [first, last] = [data.requests[0], data.requests[data.requests.length - 1]];
  const along = Number(element("load").value) / 1000;
  return {
    load: Math.max(1, Math.round(first * (last / first) ** along)),
    length: Number(element("length").value),
    // 0 to 1 in the left half lowers acceptance, 1 to 0 in the right half raises it.
    power: 2 ** ((50 - Number(element("acceptance").value)) / 20),
    cost: Number(element("cost").value) / 20,
  };
}

function accepted(length, power) {
  let [alive, sum] = [1, 1];
  for (let place = 0; place < length; place += 1) {
    alive *= data.acceptance[Math.min(place, data.acceptance.length - 1)] ** power;
    sum += alive;
  }
  return sum;
}

// Tokens per second over all requests.
function throughput(requests, length, { power, cost }) {
  const drafting = length === 0 ? 0 : cost * seconds(data.draft_seconds, requests, length);
  return (requests * accepted(length, power)) / (seconds(data.step_seconds, requests, length) + drafting);
}

function best(requests, chosen) {
  const all = data.draft_lengths.map((length) => [throughput(requests, length, chosen), length]);
  return all.reduce((found, each) => (each[0] > found[0] ? each : found));
}

function update() {
  const chosen = settings();
  const plain = (requests) => throughput(requests, 0, chosen);
  const loads = [];
  for (let each = data.requests[0]; each < data.requests[data.requests.length - 1]; each *= 1.15) loads.push(each);
  loads.push(data.requests[data.requests.length - 1]);
  element("load-shown").textContent = chosen.load;
  element("length-shown").textContent = chosen.length === 0 ? "none" : chosen.length;
  element("acceptance-shown").textContent = `first token ${(data.acceptance[0] ** chosen.power).toFixed(2)}`;
  element("cost-shown").textContent = `${chosen.cost.toFixed(2)} ×`;

  const [fastest, length] = best(chosen.load, chosen);
  const speedUp = throughput(chosen.load, chosen.length, chosen) / plain(chosen.load);
  const pays = loads.filter((each) => throughput(each, chosen.length, chosen) > plain(each));
  const until = chosen.length === 0 ? "" : pays.length === 0 ? " It pays at no load." : pays.length === loads.length
    ? " It pays at every load shown." : ` It pays up to about ${Math.round(pays[pays.length - 1])} requests.`;
  element("answer").textContent =
    `At ${chosen.load} requests, ${chosen.length} drafted tokens give ${speedUp.toFixed(2)} × the throughput of plain decoding.${until} ` +
    `The fastest length there is ${length}: ${(fastest / plain(chosen.load)).toFixed(2)} ×, ${short(fastest)} tokens/s.`;

  const lines = (of) => [
    { name: `${chosen.length} drafted`, points: loads.map((each) => [each, of(each, throughput(each, chosen.length, chosen))]) },
    { name: "fastest length", points: loads.map((each) => [each, of(each, best(each, chosen)[0])]) },
    { name: "plain", points: loads.map((each) => [each, of(each, plain(each))]) },
  ];
  const byLoad = { x: "requests decoded at once", logX: true, markX: chosen.load, fromZero: true };
  lineChart(element("speed-up"), lines((each, value) => value / plain(each)), { ...byLoad, y: "over plain decoding", title: "Speed-up under load" });
  lineChart(element("by-length"), [{
    name: `at ${chosen.load} requests`,
    points: data.draft_lengths.map((each) => [each, throughput(chosen.load, each, chosen) / plain(chosen.load)]),
  }], { x: "drafted tokens", y: "over plain decoding", title: "Speed-up by block length", markX: chosen.length, fromZero: true });
  const given = (data.points || []).map((each) => ({ name: each.name, points: each.points, dots: true }));
  lineChart(element("throughput"), [...lines((_, value) => value), ...given], { ...byLoad, y: "tokens/s, all requests", title: "Throughput" });
  lineChart(element("per-request"), lines((each, value) => value / each), { ...byLoad, y: "tokens/s of one request", title: "Speed of each request" });
}

// Settings stand in the address, so that a link shows them: explorer.html#load=400&length=3
const sliders = ["load", "length", "acceptance", "cost"];
const given = new URLSearchParams(location.hash.slice(1));
element("length").value = best(settings().load, settings())[1];
for (const id of sliders) {
  if (given.has(id)) element(id).value = given.get(id);
  element(id).addEventListener("input", () => {
    update();
    history.replaceState(null, "", `#${sliders.map((each) => `${each}=${element(each).value}`).join("&")}`);
  });
}
update();
