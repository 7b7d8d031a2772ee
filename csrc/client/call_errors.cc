#include "client/call_errors.h"

#include <algorithm>
#include <array>
#include <cstdio>

namespace shoal::client {

namespace {

std::string refused_by(const Part& part) {
  return part.peer->endpoint.label() + " refused the " + part.call->name() + ": ";
}

struct Wait {
  std::string why;
  std::string remedy;
};

Wait wait_of(const Part& part) {
  switch (part.last) {
    case wire::Status::kDeferred:
      return {"waits for a slower worker", "check whether one is stuck or does not tick, or raise timeout"};
    case wire::Status::kOverloaded:
      if (part.call->op == wire::Op::kSaveBegin) {
        return {"copies slots to another server, or ends another save, first", "raise timeout"};
      }
      return {"has no room for it", "raise the server's limits, or timeout"};
    case wire::Status::kNotAdmitted:
      return {"does not know this worker yet", "is the scheduler running, and connected to it?"};
    case wire::Status::kRetry:
      return {"misses pushes of this clock", "see the errors of these pushes"};
    case wire::Status::kBadRequest:
      return {"refused it as damaged", "something between here and there changes bytes"};
    default:
      return {"did not answer", "is it running and reachable? If it is only slow, raise timeout"};
  }
}

}  // namespace

std::string seconds_text(Seconds seconds) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.1f s", seconds);
  return text.data();
}

std::string Call::name() const {
  std::string text(wire::name(op));
  switch (op) {
    case wire::Op::kTick:
    case wire::Op::kSaveBegin:
    case wire::Op::kSavePoll:
    case wire::Op::kSaveEnd:
      break;
    default:
      text += " of table " + std::to_string(table);
  }
  return text + " at clock " + std::to_string(clock);
}

std::string Peer::silence(Seconds now) const {
  const std::string times = ends == 1 ? "once" : std::to_string(ends) + " times, last";
  const std::string end = ends == 0 ? "" : "; its connection has ended " + times + ": " + ended;
  if (last_reply.has_value()) {
    return "last answer " + seconds_text(now - *last_reply) + " ago" + end;
  }
  if (first_sent.has_value()) {
    return "no answer in the " + seconds_text(now - *first_sent) + " since the first request" + end;
  }
  return "nothing sent yet: other requests come first";
}

Failure refusal(const Part& part, std::string_view text) {
  const std::string begin = refused_by(part);
  switch (part.last) {
    case wire::Status::kWrongJob:
      return {ErrorKind::kNotConnected, begin + "it serves another job; connect again"};
    case wire::Status::kNoTable:
      return {ErrorKind::kProtocol, begin + "it has no such table; create the table first"};
    case wire::Status::kWrongVersion:
      return {ErrorKind::kProtocol,
              begin + "it has another protocol version; install one version of shoal on all machines"};
    case wire::Status::kBadRequest:
      return {ErrorKind::kProtocol, begin + std::string(text)};
    case wire::Status::kResourceExhausted:
      return {ErrorKind::kMemoryBudgetExceeded, begin + std::string(text)};
    default:
      return {ErrorKind::kShoal, begin + std::string(text)};
  }
}

Failure wrong_answer(const Part& part, std::string_view why, std::string_view remedy) {
  return {ErrorKind::kProtocol, part.peer->endpoint.label() + " answered the " + part.call->name() +
                                    " with " + std::string(why) + std::string(remedy)};
}

Failure server_lost(const Part& part, std::string_view reason, Seconds now) {
  return {ErrorKind::kServerLost, part.peer->endpoint.label() + " is lost (" + std::string(reason) + "; " +
                                      part.peer->silence(now) + "), and its rows with it: the " +
                                      part.call->name() +
                                      " is impossible; start the cluster again and load the last checkpoint"};
}

Failure deadline_passed(const Call& call, const std::vector<const Part*>& parts, std::uint32_t epoch,
                        Seconds now) {
  const std::string begin =
      "the " + call.name() + " was not done within " + seconds_text(call.deadline - call.started) + ": ";
  if (parts.empty()) {
    return {ErrorKind::kDeadlineExceeded, begin + "its slots were refused, and no map newer than epoch " +
                                              std::to_string(epoch) + " arrived; is the scheduler running?"};
  }
  const auto silence = [&](const Part* part) { return now - part->peer->last_reply.value_or(-kNever); };
  const Part& part = **std::ranges::max_element(parts, {}, silence);
  Wait wait = wait_of(part);
  if (!part.has_message) {
    wait = {"has " + std::to_string(part.peer->bytes) + " earlier bytes to receive",
            "raise timeout, or push less at once"};
  }
  return {ErrorKind::kDeadlineExceeded, begin + part.peer->endpoint.label() + " " + wait.why + " (" +
                                            part.peer->silence(now) + "); " + wait.remedy};
}

Failure dependency_failed(const Call& call, const Call& failed) {
  return {ErrorKind::kDependency, "the " + call.name() + " was not executed: the " + failed.name() +
                                      ", which it comes after, failed: " + failed.failure->text};
}

Failure held_too_long(const Call& call, const Call* blocker) {
  const std::string other = blocker == nullptr ? "calls" : "the " + blocker->name();
  return {ErrorKind::kDeadlineExceeded, "the " + call.name() + " was not executed: " + other +
                                            ", which it comes after, took " +
                                            seconds_text(call.deadline - call.started) + "; raise timeout"};
}

}  // namespace shoal::client
