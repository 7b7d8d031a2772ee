// The messages of a part: encoding its request, and storing its answer.
//
// Threads: one at a time; the owner locks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "client/call.h"
#include "client/slot_map.h"
#include "wire/wire.h"

namespace shoal::client {

// Encodes the header and the frames of a part. `pushes`: what a tick names.
void encode(Part& part, const WorkerIdentity& worker, const SlotMap& map,
            std::span<const Part* const> pushes);

// Where the values of an answer may be decoded to directly; empty: nowhere.
std::span<std::byte> answer_room(const Part& part) noexcept;

// Stores an answer as a part of the result of its call. What is wrong with it; "" if nothing is.
std::string store_answer(Part& part, const wire::Decoded& reply, std::size_t payload_bytes);

// Puts the answers of all endpoints in the order of their first slots. Where an endpoint has several runs of
// slots, those of a function with numbers for each slot are cut by run. What is wrong with them; "" if
// nothing is.
std::string put_in_slot_order(Call& call, const SlotMap& map);

// The first word of what a user's function of rows returns for a slot on which it has failed
// (shard/user_function.h).
inline constexpr double kUserFailed = 3;
// Why a user's function of rows has failed, on the first slot on which it has; nullopt if it has not.
std::optional<Failure> user_failure(const std::vector<Answer>& answers);

}  // namespace shoal::client
