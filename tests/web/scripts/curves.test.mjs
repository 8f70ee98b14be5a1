import assert from "node:assert/strict";
import { test } from "node:test";

const at = (name) => new URL(`../../../src/burnish/serve/page/static/${name}`, import.meta.url);
const { WHOLE, csv, concatenated, definedPoints, nonFinitePlaces, rangeOf, tokenRates, smoothed, xValues } =
  await import(at("curves.js"));

test("noise on a level curve takes a small part of the axis", () => {
  const [low, high] = rangeOf([2.0, 2.01, 1.99, 2.0]);
  assert.ok(high - low > 0.5, `${low} to ${high}`);
  assert.ok(low < 1.99 && high > 2.01);
});
test("a falling curve fills its axis, and a quantity that begins at zero shows it", () => {
  const [low, high] = rangeOf([3, 2, 1]);
  assert.ok(low < 1 && low > 0.8 && high > 3 && high < 3.2);
  assert.equal(rangeOf([700, 720], { zero: true })[0], 0);
  assert.deepEqual(rangeOf([null]), [0, 1]);
  assert.equal(rangeOf([0, 0], { zero: true })[0], 0);
});
test("the places of values that are NaN or infinite are known", () => {
  assert.deepEqual(nonFinitePlaces([10, 20, 30, 40], [1.5, "NaN", null, "Infinity"]), [20, 40]);
});
test("an axis of steps is labelled at whole steps", () => {
  assert.deepEqual(WHOLE.slice(0, 6), [1, 2, 5, 10, 20, 50]);
  assert.ok(WHOLE.every(Number.isInteger));
});
test("outliers are left out of the range only where that is asked for", () => {
  const values = [...new Array(99).fill(1), 100];
  assert.ok(rangeOf(values)[1] > 100);
  assert.ok(rangeOf(values, { clip: true })[1] < 2);
});
test("outliers are left out of a logarithmic range, and values that it cannot show", () => {
  const [low, high] = rangeOf([...new Array(98).fill(0.5), 0, 1000], { clip: true, log: true });
  assert.ok(low > 0.3 && high < 1, `${low} to ${high}`);
});
test("the rate is that of the interval, not of the whole run", () => {
  const columns = {
    step: [1, 2, 3],
    loss: [1, 1, 1],
    tokens: [100, 200, 500],
    time: [10, 11, 12],
    tokens_per_s: [10, 50, 80],
  };
  assert.deepEqual(tokenRates(columns), [10, 100, 300]);
  assert.deepEqual(tokenRates({ step: [1], tokens_per_s: [7] }), [7]);
});
test("the rate that the run logged is shown", () => {
  const columns = {
    step: [1, 2],
    loss: [1, 1],
    tokens: [100, 200],
    time: [10, 11],
    rate: [null, 40],
    tokens_per_s: [10, 50],
  };
  assert.deepEqual(tokenRates(columns), [10, 40]);
});
test("the time of an evaluation is no time of training", () => {
  const columns = {
    step: [1, 1, 2],
    loss: [3, null, 2],
    eval_loss: [null, 5, null],
    tokens: [100, 100, 200],
    time: [0, 9, 10],
    tokens_per_s: [50, null, 20],
  };
  assert.deepEqual(tokenRates(columns), [50, null, 100]);
});
test("a smoothed curve begins at its first value and leaves out what is no number", () => {
  assert.deepEqual(smoothed([4, "NaN", 4], 0.9), [4, null, 4]);
});
test("pieces of a log are joined, with gaps where a column is new", () => {
  assert.deepEqual(concatenated({ step: [1], loss: [2] }, { step: [2], kl: [3] }), {
    step: [1, 2],
    loss: [2, null],
    kl: [null, 3],
  });
  assert.deepEqual(definedPoints([1, 2, 3], [5, null, 7]), { x: [1, 3], y: [5, 7] });
  assert.equal(csv({ step: [1], loss: [null] }), "step,loss\n1,");
});
test("rows without a time have no place on the axis of time", () => {
  const columns = { step: [1, 2, 3], time: [null, 100, 130] };
  assert.deepEqual(xValues(columns, "time"), [null, 0, 30]);
  assert.deepEqual(xValues(columns, "step"), [1, 2, 3]);
  assert.deepEqual(xValues(columns, "tokens"), [null, null, null]);
  assert.deepEqual(definedPoints([null, 0, 30], [5, 6, null]), { x: [0], y: [6] });
});
test("names with commas and quotes are one cell of a CSV file", () => {
  assert.equal(csv({ step: [1], 'rewards/a,"b"/mean': ["NaN"] }), 'step,"rewards/a,""b""/mean"\n1,NaN');
});
