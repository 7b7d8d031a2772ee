// The errors of calls that fail, with the endpoint and the remedy.
//
// Threads: functions of their arguments.

#pragma once

#include <string>
#include <string_view>

#include "client/call.h"

namespace shoal::client {

// "4.0 s"
std::string seconds_text(Seconds seconds);

// A refusal that no repetition can change; `text`: the endpoint's.
Failure refusal(const Part& part, std::string_view text);
// An answer that cannot be used.
Failure wrong_answer(const Part& part, std::string_view why, std::string_view remedy = {});
// The call needs a lost server.
Failure server_lost(const Part& part, std::string_view reason, Seconds now);
// The call has passed its deadline: what its slowest part waits for.
Failure deadline_passed(const Call& call, const std::vector<const Part*>& parts, std::uint32_t epoch,
                        Seconds now);
// The call was to come after one that failed.
Failure dependency_failed(const Call& call, const Call& failed);
// The call has passed its deadline before it could begin.
Failure held_too_long(const Call& call, const Call* blocker);

}  // namespace shoal::client
