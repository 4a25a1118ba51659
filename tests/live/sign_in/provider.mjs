// An OpenID provider on loopback: `node provider.mjs PORT KEYS.json REDIRECT_URI`, with the package
// `oidc-provider` in the current folder. A user who logs in as NAME is in the group NAME-group; the
// client `robot` is in robot-group. SIGHUP makes it read its keys again.
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [port, keys, redirectUri] = process.argv.slice(2);
const path = createRequire(`${process.cwd()}/`).resolve("oidc-provider");
const { default: Provider } = await import(pathToFileURL(path));
const AUDIENCE = "urn:cato";

function made() {
  const provider = new Provider(`http://127.0.0.1:${port}`, {
    jwks: JSON.parse(readFileSync(keys, "utf8")),
    clients: [
      { client_id: "cato-page", token_endpoint_auth_method: "none", redirect_uris: [redirectUri], application_type: "native" },
      { client_id: "robot", client_secret: "robot-secret", redirect_uris: [], response_types: [], grant_types: ["client_credentials"] },
    ],
    pkce: { required: () => true },
    claims: { openid: ["sub"], email: ["email"], groups: ["groups"] },
    conformIdTokenClaims: false,
    findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, email: `${id}@example.com`, groups: [`${id}-group`] }) }),
    extraTokenClaims: (_, token) => (token.accountId
      ? { groups: [`${token.accountId}-group`], email: `${token.accountId}@example.com` }
      : { groups: [`${token.clientId}-group`] }),
    ttl: { AccessToken: 600, ClientCredentials: (ctx) => Number(ctx.oidc.body?.lifetime_s ?? 600), IdToken: 600, Interaction: 600, Session: 600, Grant: 600 },
    features: {
      devInteractions: { enabled: true },
      clientCredentials: { enabled: true },
      resourceIndicators: {
        enabled: true,
        defaultResource: () => AUDIENCE,
        useGrantedResource: () => true,
        getResourceServerInfo: () => ({ audience: AUDIENCE, scope: "use", accessTokenFormat: "jwt", jwt: { sign: { alg: "RS256" } } }),
      },
    },
  });
  return provider.callback();
}

let answer = made();
process.on("SIGHUP", () => { answer = made(); });
createServer((request, response) => answer(request, response)).listen(Number(port), "127.0.0.1", () => console.log("ready"));
