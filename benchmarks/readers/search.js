// How many of the questions the site's search answers, typed as they are. Build the site with
// `make site`, then: python -c 'import json, yaml; print(json.dumps(yaml.safe_load(open(
// "benchmarks/readers/questions.yaml"))))' | node benchmarks/readers/search.js [SEPARATOR]
// SEPARATOR replaces the one in mkdocs.yml. The program runs the page's own search worker.
const fs = require("fs"), path = require("path"), vm = require("vm");
const site = path.join(__dirname, "../../.cache/site");
const asked = Object.values(JSON.parse(fs.readFileSync(0, "utf8"))).flat();
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
const workers = path.join(site, "assets/javascripts/workers");
const worker = fs.readdirSync(workers).find((name) => /^search.*\.js$/.test(name));
if (process.argv[2]) index.config.separator = process.argv[2];
index.options = {suggest: false};

const found = {first: 0, "first 3": 0, "first 5": 0};
let listener, at = -1;
function answer({type, data}) {
  if (type === 3) {
    const wanted = asked[at].page.replace(/^docs\//, "").replace(/\.md$/, ".html");
    const rank = data.items.map((group) => group[0].location.split("#")[0]).indexOf(wanted);
    Object.keys(found).forEach((name, i) => (found[name] += rank >= 0 && rank < [1, 3, 5][i]));
  }
  at += 1;
  if (at === asked.length) return console.log({asked: asked.length, ...found});
  const text = asked[at].ask.replace(/[:;?]/g, " ");
  setTimeout(() => listener({data: {type: 2, data: text}}), 0);
}
const page = {addEventListener: (_, f) => (listener = f), postMessage: answer, console};
page.self = page;
vm.createContext(page);
vm.runInContext(fs.readFileSync(path.join(workers, worker), "utf8"), page);
listener({data: {type: 0, data: index}});
