// Records in a Redis server, or one that speaks its protocol.
#pragma once

#include <memory>

#include "store/record_servers.h"

namespace kvanta::store {

// redis:// and rediss://; see MakeRecordServer.
std::unique_ptr<RecordBackend> MakeRedisServer(const RecordServerConfig& config);

}  // namespace kvanta::store
