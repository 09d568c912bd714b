// A backend of StatsD: tells each packet that arrives and each flush as a line of JSON, for `scripts/watch-metrics`.
"use strict";

exports.init = function (startupTime, config, events) {
  const tell = (fields) => console.log(JSON.stringify(fields));
  events.on("packet", (packet) => tell({ packet: packet.toString() }));
  events.on("flush", (time, { counters, gauges, timers }) => tell({ flush: { counters, gauges, timers } }));
  return true;
};
